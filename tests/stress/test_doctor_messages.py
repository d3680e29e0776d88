"""The long form of the fuzzing of what hosts tell each other: PHALANX_TEST_LONG=1 (`make stress`)."""

from tests.doctor.test_messages import (  # noqa: F401 collected here too
    test_a_listener_answers_whatever_it_is_asked_and_lives,
    test_a_measured_stream_is_finite_whatever_answers,
    test_a_measured_trip_is_finite_whatever_answers,
    test_every_reader_reads_a_message_whole_or_refuses_it,
)

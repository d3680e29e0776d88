/* A sequence of collectives whose data fits a line or a stage: it is staged before the arrival and read after it. */
#define DATA (LINES * N)
#include "memory.pml"

#ifndef ROUNDS
#define ROUNDS 3
#endif

#define INTACT(r)  (data[LINE(r, seq)] == seq)

active [N] proctype rank() {
  byte me = _pid - N, seq = 1, heard;
  do
  :: seq <= ROUNDS ->
     STORE(LINE(me, seq), DIRTY);
     STORE(LINE(me, seq), seq);
     ARRIVE;
     assert(EVERY(INTACT));  /* the first byte read */
     assert(EVERY(INTACT));  /* and the last */
     seq++
  :: else -> break
  od
}

/* Shared by the models of the flag protocol: flags that reach memory late, the bell that wakes sleepers, the arrival.
 *
 * SPIN interleaves steps as if memory were sequentially consistent. But a processor may store a flag, load something
 * else, and make the store visible only after that load. The protocol must survive this. So a rank's flag store lies in
 * a buffer of one entry until `memory` writes it out, at any later moment; the rank itself sees its store at once. Data
 * is written directly: data may become visible before a flag that was stored earlier, but never after a flag that is
 * stored later (RELEASE).
 *
 * With WEAK, data also reaches memory late and out of order, as on ARM: a store of data may overtake flags that were
 * stored earlier, and later loads and stores may overtake that store. Only RELEASE and the fences enforce an order. x86
 * itself keeps stores in order, so a missing RELEASE (NO_RELEASE) would do no harm there.
 */
#ifndef N
#define N 2      /* ranks */
#endif
#ifndef LINES
#define LINES 2  /* lines and stages of a rank, alternating by the sequence number */
#endif
#define DIRTY 255  /* content of a slot that is being written */

byte flag[(LINES + 2) * N];
#define LINE(r, seq)  (r * LINES + (seq) % LINES)
#define STAGED(r)     (LINES * N + r)
#define CONSUMED(r)   (LINES * N + N + r)

byte buffered_at[N];  /* flag + 1, 0: nothing is buffered */
byte buffered[N];
byte rings, sleepers;
byte data[DATA];  /* slots of all ranks; each model defines how many */
#ifdef WEAK
byte late_at[N];    /* slot + 1 of the data store that is under way, 0: no store is */
byte late[N];
bool must_lead[N];  /* whether that store came before the buffered flag */
#endif

#if defined(WEAK) && !defined(NO_RELEASE)
#define RELEASED(r)  (!must_lead[r])
#else
#define RELEASED(r)  true
#endif

active [N] proctype memory() {
end:
  do
  :: d_step {
       buffered_at[_pid] != 0 && RELEASED(_pid) ->
       flag[buffered_at[_pid] - 1] = buffered[_pid]; buffered_at[_pid] = 0; buffered[_pid] = 0
     }
#ifdef WEAK
  :: d_step {
       late_at[_pid] != 0 ->
       data[late_at[_pid] - 1] = late[_pid]; late_at[_pid] = 0; late[_pid] = 0; must_lead[_pid] = false
     }
#endif
  od
}

/* A flag as rank `me` sees it. */
#define seen(i)  (buffered_at[me] == (i) + 1 -> buffered[me] : flag[i])
/* An atomic read-modify-write and a sequentially consistent fence both wait for the stores under way. */
#ifdef WEAK
#define DRAINED  (buffered_at[me] == 0 && late_at[me] == 0)
#define STORE(slot, value) \
  atomic { \
    late_at[me] == 0 || (late_at[me] == (slot) + 1 && !must_lead[me]) -> late_at[me] = (slot) + 1; late[me] = value \
  }
#define STORE_FLAG(index, value) \
  d_step { \
    buffered_at[me] == 0 -> buffered_at[me] = index + 1; buffered[me] = value; must_lead[me] = (late_at[me] != 0) \
  }
#else
#define DRAINED  (buffered_at[me] == 0)
#define STORE(slot, value)  data[slot] = value
#define STORE_FLAG(index, value)  d_step { DRAINED -> buffered_at[me] = index + 1; buffered[me] = value }
#endif

#if N == 1
#define EVERY(condition)  (condition(0))
#elif N == 2
#define EVERY(condition)  (condition(0) && condition(1))
#else
#define EVERY(condition)  (condition(0) && condition(1) && condition(2))
#endif

#define RING_BELL  atomic { DRAINED; rings++ }
#ifdef NO_FENCE
#define FENCE  skip
#else
#define FENCE  DRAINED
#endif

#ifdef SPINNING
/* Nobody sleeps: a smaller model, which checks only the slots. */
#define PUBLISH(index, value, all)  STORE_FLAG(index, value)
#define AWAIT(all)  (all)
#else
#ifdef NO_LAST
#define RINGS(all)  (me == 0)  /* broken: always the same rank wakes the others */
#else
#define RINGS(all)  (all)
#endif

/* Collectives::publish(): store the flag, then look for sleepers. `all` is true if the rank finds that everybody has
 * published as much as it has. The code reads the flags one by one; the model reads them in one step, at the moment of
 * the code's last read. Both get the same answer, because a condition that has become true stays true. */
#define RING_SLEEPERS(all) \
  if \
  :: sleepers != 0 -> \
     if \
     :: RINGS(all) -> RING_BELL \
     :: else \
     fi \
  :: else \
  fi
#define PUBLISH(index, value, all) \
  STORE_FLAG(index, value); \
  FENCE; \
  RING_SLEEPERS(all)

/* ControlBlock::await() with sleep_on(). Here only the bell ends a sleep, so a lost wake-up is a deadlock. */
#define AWAIT(all) \
  do \
  :: all -> break \
  :: else -> \
     atomic { DRAINED; sleepers++ }; \
     heard = rings; \
     if \
     :: all \
     :: else -> rings != heard \
     fi; \
     d_step { sleepers--; heard = 0 } \
  od
#endif

/* Collectives::arrive(): like PUBLISH, with a look at the others between the store and the fence. If that
 * look finds that all others have arrived, the rank rings if there are sleepers, and does not wait. */
#define HERE(r)  (seen(LINE(r, seq)) == seq)
#ifdef SPINNING
#define ARRIVE \
  PUBLISH(LINE(me, seq), seq, EVERY(HERE)); \
  AWAIT(EVERY(HERE))
#else
#define ARRIVE \
  STORE_FLAG(LINE(me, seq), seq); \
  if \
  :: EVERY(HERE) -> FENCE; RING_SLEEPERS(true) \
  :: else -> FENCE; RING_SLEEPERS(EVERY(HERE)); AWAIT(EVERY(HERE)) \
  fi
#endif

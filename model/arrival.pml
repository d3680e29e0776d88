/* A sequence of collectives whose data fits a line or a stage, as in Collectives::exchange(): each rank stages its data
 * before the arrival, and reads the data of the other ranks after the arrival. */
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

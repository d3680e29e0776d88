/* Collectives one after the other whose data fits a line or a stage: staged before the arrival, read after it. */
#include "memory.pml"

#ifndef ROUNDS
#define ROUNDS 3
#endif

byte stage[LINES * N];

#define INTACT(r)  (stage[LINE(r, seq)] == seq)

active [N] proctype rank() {
  byte me = _pid - N, seq = 1, heard;
  do
  :: seq <= ROUNDS ->
     stage[LINE(me, seq)] = DIRTY;
     stage[LINE(me, seq)] = seq;
     MUSTER;
     assert(EVERY(INTACT));  /* the first byte read */
     assert(EVERY(INTACT));  /* and the last */
     seq++
  :: else -> break
  od
}

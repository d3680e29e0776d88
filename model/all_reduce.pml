/* Collectives::Pipeline: stage chunk c + 1, reduce c, collect c - 1, with SLOTS slots of each kind.
 * Two all_reduces follow each other, with the arrival between them, so that the second begins in the middle of the
 * ring. */
#ifndef SLOTS
#define SLOTS 3
#endif
#define DATA (2 * SLOTS * N)
#include "memory.pml"

#ifndef CHUNKS
#define CHUNKS 4  /* chunks of the first all_reduce */
#endif
#ifndef MORE_CHUNKS
#define MORE_CHUNKS 2  /* chunks of the second all_reduce */
#endif

/* Chunks count from 1 over all collectives: chunk k is published by the counter value k. */
#define STAGING(r, k)    (r * SLOTS + (k) % SLOTS)
#define RESULT(r, k)     (SLOTS * N + r * SLOTS + (k) % SLOTS)
#define HAS_STAGED(r)    (seen(STAGED(r)) >= wanted)
#define HAS_REDUCED(r)   (seen(CONSUMED(r)) >= wanted)
#define STAGING_INTACT(r)  (r == me || data[STAGING(r, k)] == k)
#define RESULT_INTACT(r)   (r == me || data[RESULT(r, k - 1)] == k - 1)
#define LAST_RESULT_INTACT(r)  (r == me || data[RESULT(r, k)] == k)

#define STAGE_ONE(next) \
  STORE(STAGING(me, next), DIRTY); \
  STORE(STAGING(me, next), next); \
  wanted = next; \
  PUBLISH(STAGED(me), next, EVERY(HAS_STAGED))

#define REDUCE_ONE \
  atomic { assert(EVERY(STAGING_INTACT)); STORE(RESULT(me, k), DIRTY) }; \
  atomic { assert(EVERY(STAGING_INTACT)); STORE(RESULT(me, k), k) }; \
  wanted = k; \
  PUBLISH(CONSUMED(me), k, EVERY(HAS_REDUCED))

active [N] proctype rank() {
  byte me = _pid - N, seq = 1, heard, wanted, k = 1, first = 1, last = CHUNKS;
  do
  :: seq <= 2 && first <= last ->
     ARRIVE;
     STAGE_ONE(k);
     do
     :: k <= last ->
        if
        :: k < last -> STAGE_ONE((k + 1))
        :: else
        fi;
        wanted = k;
        AWAIT(EVERY(HAS_STAGED));
        REDUCE_ONE;
        if
        :: k > first ->
           wanted = k - 1;
           AWAIT(EVERY(HAS_REDUCED));
           assert(EVERY(RESULT_INTACT));
           assert(EVERY(RESULT_INTACT))
        :: else
        fi;
        k++
     :: else -> break
     od;
     k = last;
     wanted = k;
     AWAIT(EVERY(HAS_REDUCED));
     assert(EVERY(LAST_RESULT_INTACT));
     assert(EVERY(LAST_RESULT_INTACT));
     d_step { k = last + 1; first = k; last = last + MORE_CHUNKS; seq++ }
  :: else -> break
  od
}

/* Collectives::exchange_chunks(): every rank stages chunks in a ring of RING slots, one chunk ahead of the one that it
 * consumes. FLOW says which ranks need whose data: 0: all ranks need the data of all ranks; 1: all ranks need the data
 * of the root (rank 0); 2: only the root needs the data of all ranks. */
#ifndef RING
#define RING 6  /* 2 * kSlots */
#endif
#ifndef LAG
#define LAG RING  /* a slot is reused once all ranks have consumed the chunk this far back */
#endif
#ifndef CHUNKS
#define CHUNKS 8
#endif
#ifndef FLOW
#define FLOW 0
#endif

#define DATA (RING * N)
#include "memory.pml"

/* Chunks count from 1: chunk k is published by the counter value k. */
#define SLOT(r, k)       (r * RING + (k) % RING)
#define NEEDED(r)        (FLOW == 0 || (FLOW == 1 && r == 0) || (FLOW == 2 && me == 0))
#define HAS_STAGED(r)    (seen(STAGED(r)) >= wanted)
#define READY(r)         (!NEEDED(r) || HAS_STAGED(r))
#define HAS_CONSUMED(r)  (seen(CONSUMED(r)) >= wanted)
#define INTACT(r)        (!NEEDED(r) || data[SLOT(r, k)] == k)

#define STAGE_ONE(next) \
  if \
  :: next > LAG -> wanted = next - LAG; AWAIT(EVERY(HAS_CONSUMED)) \
  :: else \
  fi; \
  STORE(SLOT(me, next), DIRTY); \
  STORE(SLOT(me, next), next); \
  wanted = next; \
  PUBLISH(STAGED(me), next, (FLOW != 0 || EVERY(HAS_STAGED)))

active [N] proctype rank() {
  byte me = _pid - N, heard, wanted, k = 1;
  STAGE_ONE(k);
  do
  :: k <= CHUNKS ->
     if
     :: k < CHUNKS -> STAGE_ONE((k + 1))
     :: else
     fi;
     wanted = k;
     AWAIT(EVERY(READY));
     assert(EVERY(INTACT));
     assert(EVERY(INTACT));
     PUBLISH(CONSUMED(me), k, EVERY(HAS_CONSUMED));
     k++
  :: else -> break
  od
}

#!/bin/sh
# Check the flag protocol and the agreement of nodes with SPIN: model/check.sh [--short]
# Each line names a model, its settings and the expected result: ok, or the error that a broken variant must show.
set -eu
models=$(cd "$(dirname "$0")" && pwd)
short=${1:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
num_run=0

check() {  # check NAME EXPECTED [-DSETTING...]
  name=$1 expected=$2
  shift 2
  spin -a "$@" "$models/$name.pml" > spin.log 2>&1 || { cat spin.log; exit 2; }
  ${CC:-cc} -O1 -w -DSAFETY -DCOLLAPSE -DNOFAIR -DMEMLIM=4000 -o pan pan.c
  ./pan -m1000000 -w22 > pan.log 2>&1 || { cat pan.log; exit 2; }
  case $(cat pan.log) in
    *"pan:1: invalid end state"*) found=deadlock ;;
    *"pan:1: assertion violated"*) [ "$name" = agreement ] && found="two sides" || found=overwritten ;;
    *"Search not completed"* | *"max search depth too small"* | *"out of memory"*) found="an unfinished search" ;;
    *"errors: 0"*) found=ok ;;
    *) found=nothing ;;
  esac
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
  echo "$name $*: $found, $states states"
  if [ "$found" != "$expected" ]; then
    cat pan.log
    echo "expected: $expected"
    exit 1
  fi
  num_run=$((num_run + 1))
}

# The code as it is.
check arrival ok -DN=2 -DROUNDS=4
check arrival ok -DN=3
check all_reduce ok -DN=2
check all_reduce ok -DN=3 -DSPINNING
check exchange ok -DN=2 -DFLOW=0
check exchange ok -DN=2 -DFLOW=1
check exchange ok -DN=2 -DFLOW=2
# With stores reordered, as ARM may do.
check arrival ok -DN=2 -DROUNDS=4 -DWEAK
check all_reduce ok -DN=2 -DWEAK
for flow in 0 1 2; do
  check exchange ok -DN=2 -DFLOW=$flow -DWEAK
done
# Nodes that lose each other at any moment; one of them dies.
check agreement ok -DMEMBERS=2
check agreement ok -DMEMBERS=3 -DCUTS=0
if [ "$short" != --short ]; then
  check agreement ok -DMEMBERS=2 -DNODES=3  # the third node is started when one of the two has died
  check agreement ok -DMEMBERS=3 -DCUTS=1 -DFOR_EVER  # any cable, in one direction or both, and one death
  check arrival ok -DN=3 -DWEAK
  check all_reduce ok -DN=3 -DSPINNING -DWEAK
  check arrival ok -DN=3 -DROUNDS=4
  check all_reduce ok -DN=2 -DCHUNKS=6 -DMORE_CHUNKS=4
  check all_reduce ok -DN=3 -DCHUNKS=2 -DMORE_CHUNKS=1
  check all_reduce ok -DN=3 -DSPINNING -DCHUNKS=6 -DMORE_CHUNKS=4
  for flow in 0 1 2; do
    check exchange ok -DN=3 -DFLOW=$flow -DRING=2 -DCHUNKS=3
    check exchange ok -DN=3 -DFLOW=$flow -DSPINNING
  done
fi

# Broken on purpose, to show that the models can fail.
check arrival deadlock -DN=2 -DNO_FENCE            # if the look at the sleepers overtakes the store, a wake-up is lost
check all_reduce deadlock -DN=2 -DNO_FENCE        # (in the exchange, a later wake-up makes up for each lost one)
for model in arrival all_reduce exchange; do
  check $model deadlock -DN=3 -DNO_LAST           # rank 0 alone rings, last or not
done
check arrival overwritten -DN=2 -DLINES=1          # one line and stage instead of two
check all_reduce overwritten -DN=2 -DSLOTS=2      # two slots instead of three
check all_reduce overwritten -DN=3 -DSPINNING -DSLOTS=2
check exchange overwritten -DN=2 -DFLOW=1 -DLAG=7 # waits for the readers of one chunk too far back
for model in arrival all_reduce exchange; do
  check $model overwritten -DN=2 -DWEAK -DNO_RELEASE  # a flag overtakes the data that it announces
done
for rule in SILENT_ARE_DEAD NO_VOTES HALF_IS_ENOUGH OLD_VOTES LONG_VOTES NOT_SHOWN NEW_LINKS_ARE_FRESH; do
  check agreement "two sides" -DMEMBERS=2 -D$rule
done
for rule in ALL_COUNT_DEAD ONLY_NEWEST_BASE; do
  check agreement "two sides" -DMEMBERS=3 -DCUTS=1 -DFOR_EVER -D$rule
done
echo "$num_run checks passed"

/* Which nodes train together: agreement.py, election.py and attempt_watch.py of src/phalanx/launch/nodes, rule by rule
 * and under the same names.
 *
 * MEMBERS nodes train in view 0, which node 0 leads. From then on, anything may happen in any order: messages of a node
 * arrive or get lost, answers become old, links to silent nodes are lost and made again, and DEATHS nodes die. For each
 * death, one of NODES - MEMBERS further nodes may be started: a node that is started again has a new number. A node
 * decides after each event, as in the code. `is_late` is true if the event is that a timer of the node has run out.
 *
 * There is no clock. `fresh` is true while an answer is recent enough to count. An answer may become old at any moment,
 * and at the latest before the node that gave the answer considers this node lost: an answer counts for 0.9 of the
 * silence limit, and a node is considered lost after the whole limit.
 */
#ifndef MEMBERS
#define MEMBERS 2
#endif
#ifndef NODES
#define NODES MEMBERS
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef TERMS
#define TERMS 3   /* higher terms, and more views than VIEWS, are not explored */
#endif
#ifndef VIEWS
#define VIEWS 3
#endif
#define NOBODY NODES
#define NO_VIEW VIEWS
#define IDLE 0
#define RUNNING 1
#define STOPPING 2
#define BIT(node) (1 << (node))
#define HAS(set, node) (((set) >> (node)) & 1)
#define SIZE(set) (HAS(set, 0) + HAS(set, 1) + HAS(set, 2) + HAS(set, 3))

typedef View { byte term; byte number; byte leader; byte members; byte bases }  /* bases: set of views */
typedef Said {
  unsigned term : 3; unsigned leader : 3; unsigned view : 3;
  bit in_office; bit is_settled; bit is_idle; bit has_left; bit running
}
typedef Peer { bit linked; bit fresh; bit unproven; bit dead; Said said }
typedef Node {
  bit alive; bit started; bit running; bit has_left;
  unsigned term : 3; unsigned leader : 3; unsigned view : 3; unsigned ranks : 2; unsigned trained_in : 3
  Peer peer[NODES]
}
View views[VIEWS];
Node node[NODES];
byte num_views = 1, num_deaths, num_came;
#ifdef CUTS  /* answers grow old only over cables that are cut */
byte num_cuts, from, to;
bit is_both;
#define IS_CUT(one, other) ((HAS(from, one) && HAS(to, other)) || (is_both && HAS(from, other) && HAS(to, one)))
#define MAY_AGE (IS_CUT(i, other) || IS_CUT(other, i) || !node[other].alive)
#define MAY_BE_SILENT (IS_CUT(other, i) || !node[other].alive || !node[other].peer[i].linked)
#else
#define IS_CUT(one, other) false
#define MAY_AGE true
#define MAY_BE_SILENT true
#endif
hidden byte j, k, v, set, votes, before, newest, holder, holder_term, preferred, current, swap;
hidden byte ok, is_late, has_changed, quorum, office, settled, coming;

#define NEWER(one, other) ((one) != NO_VIEW && ((other) == NO_VIEW || views[one].term > views[other].term \
  || (views[one].term == views[other].term && views[one].number > views[other].number)))
#define PEER node[i].peer[j]
#define LEADS (node[i].leader == i)
#define VIEW views[node[i].view]
#define IS_MEMBER (node[i].view != NO_VIEW && HAS(VIEW.members, i))
#ifdef OLD_VOTES
#define FRESH(n) true
#else
#define FRESH(n) node[i].peer[n].fresh
#endif
#define IS_WITH_US(n) ((n) == i || (node[i].peer[n].linked && FRESH(n)))
#define FOLLOWS(n) ((n) == i || (IS_WITH_US(n) && node[i].peer[n].said.leader == i && node[i].peer[n].said.term == node[i].term))

#ifdef NO_VOTES
#define IS_ENOUGH(votes) true
#elif defined HALF_IS_ENOUGH
#define IS_ENOUGH(votes) (2 * SIZE(votes) >= SIZE(views[v].members))
#else
#define IS_ENOUGH(votes) (2 * SIZE(votes) > SIZE(views[v].members) \
  || (2 * SIZE(votes) == SIZE(views[v].members) && HAS(votes, views[v].leader)))
#endif

/* Election.has_quorum() of the group of view v -> quorum */
inline has_quorum() {
  votes = 0; set = 0; before = true;
  for (j : 0 .. NODES - 1) {
    if :: HAS(views[v].members, j) && FOLLOWS(j) -> votes = votes | BIT(j) :: else fi;
    if :: PEER.dead -> set = set | BIT(j) :: else fi
  }
  /* whether all before us in the succession (the view's leader, then by number) have voted or died */
  if
  :: views[v].leader == i -> skip
  :: else ->
    if :: HAS(votes | set, views[v].leader) -> skip :: else -> before = false fi;
    for (j : 0 .. NODES - 1) {
      if
      :: HAS(views[v].members, j) && !HAS(votes | set, j) && (j < i || !HAS(views[v].members, i)) -> before = false
      :: else
      fi
    }
  fi;
#ifdef ALL_COUNT_DEAD
  before = true;
#endif
#ifdef NONE_COUNTS_DEAD
  before = false;
#endif
  if :: before -> votes = votes | (set & views[v].members) :: else fi;
  quorum = IS_ENOUGH(votes)
}

/* Agreement._bases() -> set */
inline find_bases() {
#ifdef ONLY_NEWEST_BASE
  set = BIT(node[i].view);
#else
  if
  :: node[i].started -> set = BIT(node[i].view)
#ifndef ONLY_OLD_BASES
  :: !node[i].started && VIEW.leader != i -> set = VIEW.bases | BIT(node[i].view)
#endif
  :: else -> set = VIEW.bases
  fi
#endif
}

/* Agreement._is_in_office() -> office */
inline check_office() {
  office = LEADS && IS_MEMBER;
  if
  :: office ->
    find_bases(); current = set;
    for (k : 0 .. VIEWS - 1) {
      if :: office && HAS(current, k) -> v = k; has_quorum(); office = quorum :: else fi
    }
  :: else
  fi
}

/* Agreement._is_settled() -> settled */
inline check_settled() {
  settled = (node[i].view != NO_VIEW);
  if
  :: settled ->
    set = VIEW.members;
    for (k : 0 .. VIEWS - 1) {
      if :: HAS(VIEW.bases, k) -> set = set | views[k].members :: else fi
    }
    for (j : 0 .. NODES - 1) {
      if :: HAS(VIEW.members, j) && j != i && !PEER.linked -> settled = false :: else fi;
#ifndef NOT_SHOWN
      if :: HAS(set, j) && PEER.linked && NEWER(node[i].view, PEER.said.view) -> settled = false :: else fi
#endif
    }
  :: else
  fi
}

/* Election._vote() */
inline vote(other) {
  if
#ifdef VOTE_TWICE
  :: node[i].peer[other].said.leader == other && node[i].peer[other].said.term >= node[i].term && node[i].leader != other ->
#else
  :: node[i].peer[other].said.leader == other && node[i].peer[other].said.term > node[i].term ->
#endif
    node[i].term = node[i].peer[other].said.term; node[i].leader = other; node[i].running = false; has_changed = true
  :: else
  fi
}

/* Election._holder() -> holder, holder_term. Also, the newest term of nodes that follow another leader -> newest */
inline look_around() {
  holder = NOBODY; holder_term = 0; newest = 0;
  for (j : 0 .. NODES - 1) {
    if
    :: PEER.linked ->
      if :: PEER.said.leader != i && PEER.said.term > newest -> newest = PEER.said.term :: else fi;
      if
      :: PEER.said.in_office && PEER.said.leader == j && PEER.said.term > holder_term && !NEWER(node[i].view, PEER.said.view) ->
        holder = j; holder_term = PEER.said.term
      :: else
      fi
    :: else
    fi
  }
}

/* Election._preferred() -> preferred */
inline prefer() {
  preferred = holder;
  if
  :: preferred != NOBODY -> skip
  :: else ->
    if
    :: node[i].view == NO_VIEW ->
      for (j : 0 .. NODES - 1) {
        if :: preferred == NOBODY && PEER.linked && PEER.said.leader == j -> preferred = j :: else fi
      }
    :: else ->
      j = VIEW.leader;
      if :: PEER.linked || (j == i && IS_MEMBER) -> preferred = j :: else fi;
      for (j : 0 .. NODES - 1) {
        if
        :: preferred == NOBODY && HAS(VIEW.members, j) && (PEER.linked || j == i) -> preferred = j
        :: else
        fi
      }
    fi
  fi
}

/* Election.choose() */
inline choose_leader() {
  look_around();
  check_office();
  if
  :: office ->
    if
    :: holder != NOBODY && holder_term > node[i].term -> vote(holder)
    :: else ->
      if :: newest >= node[i].term && newest < TERMS -> node[i].term = newest + 1; has_changed = true :: else fi
    fi
  :: else ->
    j = node[i].leader;
    if :: j == NOBODY -> ok = false :: j == i -> ok = false :: else -> ok = PEER.linked && PEER.said.leader == j fi;
    if
    :: ok ->
      if :: PEER.said.term > node[i].term -> node[i].term = PEER.said.term; has_changed = true :: else fi;
      if :: holder != NOBODY && !PEER.said.in_office -> vote(holder) :: else fi
    :: else ->
      prefer();
      if
      :: preferred == i ->
        if
        :: (!LEADS || (newest >= node[i].term && is_late)) && newest < TERMS && node[i].term < TERMS ->
          if :: newest > node[i].term -> node[i].term = newest + 1 :: else -> node[i].term = node[i].term + 1 fi;
          node[i].leader = i; node[i].running = false; is_late = false; has_changed = true
        :: else
        fi
      :: preferred != i && preferred != NOBODY -> vote(preferred)
      :: else
      fi
    fi
  fi
}

inline propose() {
  ok = (node[i].ranks == IDLE && num_views < VIEWS);
  set = BIT(i);
  for (j : 0 .. NODES - 1) {
    if
    :: j != i && PEER.linked ->
      if
      :: FOLLOWS(j) -> set = set | BIT(j); ok = ok && PEER.said.is_idle
      :: else -> ok = ok && (is_late || !HAS(VIEW.members, j))
      fi
    :: else
    fi
  }
  if
  :: ok ->
    v = num_views; num_views++;
    views[v].members = set;
    find_bases();
    views[v].bases = set; views[v].leader = i; views[v].term = node[i].term; views[v].number = VIEW.number + 1;
    for (k : 0 .. VIEWS - 1) {  /* no two views have the same key */
      assert(k >= v || views[k].term != views[v].term || views[k].number != views[v].number)
    }
    take_view(v, false)
  :: else
  fi
}

inline take_view(newer_view, is_started) {
  if
  :: NEWER(newer_view, node[i].view) ->
    node[i].view = newer_view; node[i].started = false; node[i].running = false; node[i].has_left = false;
    has_changed = true
  :: else
  fi;
  if :: node[i].view == newer_view && is_started -> node[i].started = true :: else fi
}

#ifdef NOT_ACCEPTED
#define ACCEPTS true
#else
#define ACCEPTS (PEER.said.view == node[i].view && PEER.said.is_settled)
#endif

inline lead() {
  if
  :: node[i].running ->  /* AttemptWatch.is_to_end() */
    ok = true;
    for (j : 0 .. NODES - 1) {
      if
      :: HAS(VIEW.members, j) && (!IS_WITH_US(j) || (j != i && PEER.said.has_left && PEER.said.view == node[i].view)) ->
        ok = false
      :: !HAS(VIEW.members, j) && is_late && IS_WITH_US(j) && FOLLOWS(j) -> ok = false  /* _may_grow() */
      :: else
      fi
    }
    if :: !ok || node[i].has_left -> node[i].running = false; has_changed = true :: else fi
  :: else ->
    check_office();
    if
    :: office ->
      coming = (VIEW.leader == i && !node[i].started);
      for (j : 0 .. NODES - 1) {
        if :: HAS(VIEW.members, j) && !IS_WITH_US(j) -> coming = false :: else fi
      }
      check_settled();
      ok = coming && settled;  /* _may_start() */
      for (j : 0 .. NODES - 1) {
        if
        :: HAS(VIEW.members, j) && j != i && !(FOLLOWS(j) && ACCEPTS) -> ok = false
        :: else
        fi
      }
      if
      :: ok -> node[i].started = true; node[i].running = true; has_changed = true
      :: !ok && !coming -> propose()
      :: else
      fi
    :: else
    fi
  fi
}

/* Agreement._run(), with the assertion that two sides never train */
inline run_ranks() {
  j = node[i].leader;
  if
  :: j == i -> ok = node[i].running
  :: j == NOBODY -> ok = false
  :: else -> ok = PEER.linked && PEER.said.running && PEER.said.view == node[i].view
  fi;
  if :: ok && !node[i].started -> node[i].started = true; has_changed = true :: else fi;
  coming = ok && IS_MEMBER;
  for (j : 0 .. NODES - 1) {
    if :: coming && HAS(VIEW.members, j) && !IS_WITH_US(j) -> coming = false :: else fi
  }
  if
  :: coming && node[i].trained_in != node[i].view && node[i].ranks == IDLE ->
    node[i].ranks = RUNNING; node[i].trained_in = node[i].view; has_changed = true;
    for (j : 0 .. NODES - 1) {  /* two sides never train */
      assert(!node[j].alive || node[j].ranks != RUNNING || node[j].trained_in == node[i].trained_in)
    }
  :: !coming && node[i].ranks == RUNNING -> node[i].ranks = STOPPING; node[i].has_left = ok; has_changed = true
  :: else
  fi
}

inline decide() {
  do
  :: has_changed = false;
    choose_leader();
    if :: LEADS && node[i].view != NO_VIEW -> lead() :: else fi;
    if :: node[i].view != NO_VIEW -> run_ranks() :: else fi;
    if :: !has_changed -> break :: else fi
  od;
  skip
}

/* A message of node `other` arrives at node i. */
inline hear(other) {
  swap = i; i = other; check_office(); check_settled(); i = swap;
  j = other;
  PEER.fresh = true;
  PEER.said.term = node[other].term; PEER.said.leader = node[other].leader; PEER.said.view = node[other].view;
  PEER.said.in_office = office; PEER.said.is_settled = settled; PEER.said.is_idle = (node[other].ranks == IDLE);
  PEER.said.has_left = node[other].has_left; PEER.said.running = node[other].running
}

inline forget(other) {
  j = other;
  PEER.linked = false; PEER.fresh = false; PEER.unproven = false;
  PEER.said.term = 0; PEER.said.leader = NOBODY; PEER.said.view = NO_VIEW; PEER.said.in_office = false;
  PEER.said.is_settled = false; PEER.said.is_idle = true; PEER.said.has_left = false; PEER.said.running = false
}

inline begin() {
  views[0].leader = 0; views[0].members = BIT(MEMBERS) - 1; views[0].term = 1; views[0].number = 1; views[0].bases = 1;
  for (i : 0 .. NODES - 1) {
    node[i].view = NO_VIEW; node[i].leader = NOBODY; node[i].trained_in = NO_VIEW;
    for (k : 0 .. NODES - 1) { forget(k) }
    if
    :: i < MEMBERS ->
      node[i].alive = true; node[i].term = 1; node[i].leader = 0; node[i].view = 0; node[i].started = true;
      node[i].running = (i == 0); node[i].ranks = RUNNING; node[i].trained_in = 0;
      for (j : 0 .. MEMBERS - 1) {
        if
        :: j != i ->
          PEER.linked = true; PEER.fresh = true; PEER.said.term = 1; PEER.said.leader = 0; PEER.said.view = 0;
          PEER.said.in_office = (j == 0); PEER.said.is_settled = true; PEER.said.is_idle = false;
          PEER.said.running = (j == 0)
        :: else
        fi
      }
    :: else
    fi
  }
}

/* The process of node i has ended, and no other node knows it yet. */
inline die() {
  node[i].alive = false; num_deaths++;
  node[i].started = false; node[i].running = false; node[i].has_left = false; node[i].term = 0; node[i].ranks = IDLE;
  node[i].leader = NOBODY; node[i].view = NO_VIEW; node[i].trained_in = NO_VIEW;
  for (k : 0 .. NODES - 1) { forget(k); PEER.dead = false };
  skip
}

#ifdef SILENT_ARE_DEAD
#define TAKE_FOR_DEAD_IF_SILENT PEER.dead = true
#else
#define TAKE_FOR_DEAD_IF_SILENT skip
#endif
#ifdef EVERY_END_IS_DEATH
#define IS_DEATH true
#else
#define IS_DEATH PEER.fresh
#endif
#ifdef LONG_VOTES
#define HAS_EXPIRED(other) true
#else
#define HAS_EXPIRED(other) (!node[other].alive || !node[other].peer[i].fresh || node[other].peer[i].unproven)
#endif
#ifdef NEW_LINKS_ARE_FRESH  /* although the other node may not have heard from us */
#define IS_FRESH_IF_NEW true
#else
#define IS_FRESH_IF_NEW false
#endif

/* Events of node i alone. */
proctype Live(byte i) {
end:
  do
  :: atomic {
    if
    :: d_step { node[i].alive && node[i].ranks == STOPPING -> node[i].ranks = IDLE; is_late = false }
    :: d_step { node[i].alive -> is_late = true }  /* a timer has run out */
    :: d_step { node[i].alive && num_deaths < DEATHS -> die(); is_late = false }
    :: d_step { !node[i].alive && i == MEMBERS + num_came && num_came < num_deaths ->
        node[i].alive = true; num_came++; is_late = false }
    fi;
    d_step { if :: node[i].alive -> decide() :: else fi; skip }
  }
  od
}

#define CAN_TALK (!IS_CUT(i, other) && !IS_CUT(other, i))
#define HEARS (node[i].alive && node[other].alive && node[i].peer[other].linked && node[other].peer[i].linked && !IS_CUT(other, i))

/* Events between node i and another node. */
proctype Link(byte i, other) {
end:
  do
  :: atomic {
    if
    :: d_step { HEARS && NEWER(node[other].view, node[i].view) -> take_view(node[other].view, node[other].started) }
    :: d_step { HEARS && !NEWER(node[other].view, node[i].view) -> hear(other) }
    :: d_step { node[i].peer[other].fresh && MAY_AGE -> node[i].peer[other].fresh = false; node[i].peer[other].unproven = false }
    :: d_step { node[i].peer[other].linked && !node[i].peer[other].fresh && HAS_EXPIRED(other) && MAY_BE_SILENT ->
        forget(other); TAKE_FOR_DEAD_IF_SILENT }
    :: d_step { node[i].peer[other].linked && !node[other].alive && CAN_TALK ->  /* its port refuses */
        j = other; if :: IS_DEATH -> PEER.dead = true :: else fi; forget(other) }
    :: d_step { node[i].alive && node[other].alive && !node[i].peer[other].linked && CAN_TALK ->
        j = other; PEER.linked = true; PEER.fresh = IS_FRESH_IF_NEW; PEER.unproven = IS_FRESH_IF_NEW; PEER.dead = false }
    fi;
    d_step { is_late = false; decide() }
  }
  od
}

#ifdef CUTS
/* A cut: for a while, messages from one node to some of the other nodes vanish, in one direction or in both. */
proctype Cable() {
  byte one, some;
end:
  do
  :: atomic {
    num_cuts < CUTS && from == 0 ->
    num_cuts++;
    select(one : 0 .. NODES - 1);
    select(some : 1 .. BIT(NODES) - 1);
    from = BIT(one); to = some & ~BIT(one);
    if :: is_both = true :: skip fi;
    one = 0; some = 0
  }
#ifndef FOR_EVER
  :: d_step { from != 0 -> from = 0; to = 0; is_both = false }
#endif
  od
}
#endif

init {
  byte i, o;
  atomic {
    d_step { begin(); i = 0; o = 0 }
    do
    :: i < NODES ->
      run Live(i);
      do
      :: o < NODES -> if :: o != i -> run Link(i, o) :: else fi; o++
      :: else -> break
      od;
      o = 0; i++
    :: else -> break
    od;
#ifdef CUTS
    run Cable();
#endif
    i = 0
  }
}

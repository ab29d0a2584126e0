/* The log: commit, fence and floor. What a producer does, request by request, beside a reclaimer that deletes slots.

   One atomic step is one store request with the local work that follows it; everything between two requests interleaves
   with everything else. A process may stand still for ever at any point: that is how it is killed or frozen.

   processes  incarnation  producer/stepfs_producer/{recovery,commit,rebase}.py over fs/stepfs/log/{reader,snapshots}.py
              reclaimer    fs/stepfs/lake/reclaim/run.py, of which only what touches the log; control.pml has the other half
              network      requests whose caller gave up on them, and which land later or never
   numbers    slots, versions and the floor count from 1 here (from 0 in the code); head 0 is the genesis state
   mutants    `mutant` is set at the start from the environment; 0 is the protocol as it stands
   witnesses  saw(n) fails when `witness` is n: the test asks for each of them, so that no check holds for want of cases

   `open` of the reclaimer is one step, since the checks on `open` of a producer say that it finds the truth of some moment.
   Left out: LIST in place of probes when far behind, retiring, seals, segments, and snapshots by producers. */

#ifndef SLOTS
#define SLOTS 4         /* log slots */
#endif
#ifndef STARTED
#define STARTED 1       /* the first incarnations stand in the genesis state; 0: they start, and race with the second */
#endif
#ifndef INCARNATIONS
#define INCARNATIONS 4  /* 0 and 1 are producer 0's first and second, 2 and 3 producer 1's */
#endif

#define NOBODY 9
#define COMMIT 0        /* what a rebase comes to: a commit, or one of two refusals */
#define NOTHING 1
#define FENCE 2
#define PRODUCER(i) ((i) / 2)
#define own PRODUCER(me)
/* A commit id is random; here it is the incarnation and whether it has sent other bytes to the same slot before, which
   only mutants do: ids are never compared but within one slot. */
#define ID(i, again) (2 * (i) + (again) + 1)
#define AUTHOR(id) (((id) - 1) / 2)
#define TOP (SLOTS + 1)

c_decl {
    static int bound(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
};

mtype = { order, exactly_once, fencing, durable, readers_agree, false_fence, spurious_corrupt, no_gap };

byte mutant, witness, processes, appends, rounds;   /* the bounds: see init */
bool restarts;
mtype violated;                                 /* never set: it makes pan print the number of the property */
byte only;                                      /* the one property to check; 0: all of them */
#define check(condition, property) assert((condition) || (only && only != property) || violated == property)
#define saw(number) assert(witness != number)

/* ---- the store ---- */

typedef Commit { byte id; byte prev; byte first; byte count };  /* count 0: an epoch commit. `first` is a record's number */
typedef Reading { byte id; byte next[2]; byte live[2] };          /* what a reader folds; the id stands for the digest chain */

Commit slot[TOP];               /* log/<n>; id 0: absent */
Reading snapshot[TOP];            /* snapshot/<n>; id 0: absent */
byte floor = 1;                 /* of the newest record under floor/: slots below it may be deleted */

byte faults;                    /* ambiguous creates still to come, in all */
Commit flying[INCARNATIONS];    /* a create without an answer that has not landed yet */
byte flying_to[INCARNATIONS];

/* ---- the truth: every slot's first occupant, whoever deletes it later ---- */

byte length;
byte truth[TOP];
Reading last;

/* A create reaches an absent slot. The first occupant of a slot makes history, and history is checked here. */
inline land(number, body) {
    slot[number].id = body.id; slot[number].prev = body.prev;
    slot[number].first = body.first; slot[number].count = body.count;
    if
    :: number > length ->
        check(number == length + 1, no_gap);
        check(body.prev == truth[length], order);
        if
        :: body.count ->
            check(last.live[PRODUCER(AUTHOR(body.id))] == AUTHOR(body.id), fencing);
            check(body.first == last.next[PRODUCER(AUTHOR(body.id))], exactly_once);
            last.next[PRODUCER(AUTHOR(body.id))] = body.first + body.count
        :: else ->
            last.live[PRODUCER(AUTHOR(body.id))] = AUTHOR(body.id)
        fi;
        last.id = body.id;
        length = number;
        truth[number] = body.id
    :: else -> saw(1)                           /* a deleted slot is created again: hazard 1 */
    fi
}

inline copy(to, from) {
    to.id = from.id; to.next[0] = from.next[0]; to.next[1] = from.next[1];
    to.live[0] = from.live[0]; to.live[1] = from.live[1]
}

inline genesis(to) {
    to.id = 0; to.next[0] = 0; to.next[1] = 0;
    to.live[0] = (STARTED -> 0 : NOBODY); to.live[1] = (STARTED -> 2 : NOBODY)
}

/* ---- a producer's incarnation ---- */

/* lake/log/reader.py _touch: `low` is the lowest slot acted on since the last floor check, 0 for none */
inline touch(number) {
    if
    :: low == 0 || number < low -> low = number
    :: else
    fi
}

/* lake/log/apply.py: does the commit in this slot continue the head? */
#define chains(number) (slot[number].prev == head.id && \
    (slot[number].count == 0 || head.live[PRODUCER(AUTHOR(slot[number].id))] == AUTHOR(slot[number].id)))

/* lake/log/reader.py extend */
inline extend(commit) {
    if
    :: commit.count -> head.next[PRODUCER(AUTHOR(commit.id))] = head.next[PRODUCER(AUTHOR(commit.id))] + commit.count
    :: else -> head.live[PRODUCER(AUTHOR(commit.id))] = AUTHOR(commit.id)
    fi;
    head.id = commit.id;
    version++;
    again = false
}

/* rebase.py rebase and rebase_start: the next attempt into `body`, or the refusal in `wants` */
inline rebase() {
    wants = COMMIT;
    if
    :: !started && head.live[own] == me -> wants = NOTHING
    :: !started && head.live[own] != me -> body.first = 0; body.count = 0
    :: started && head.live[own] != me && mutant != 1 -> wants = FENCE
    :: started && (head.live[own] == me || mutant == 1) ->
        check(head.next[own] >= base || mutant, spurious_corrupt);        /* a gap in seq */
        if
        :: pending == base -> pending++                                 /* it has nothing to do: something is appended */
        :: else
        fi;
        if
        :: mutant == 2 || mutant == 3 -> body.first = base; body.count = pending - base
        :: else ->
            if
            :: pending <= head.next[own] -> wants = NOTHING
            :: else -> body.first = head.next[own]; body.count = pending - head.next[own]
            fi
        fi
    fi;
    if
    :: wants == COMMIT ->
        body.id = ID(me, again);
        again = true;
        body.prev = head.id
    :: else -> body.id = 0; body.prev = 0; body.first = 0; body.count = 0
    fi
}

/* lake/log/snapshots.py newest_snapshot: the newest of what was listed and not tried; without any, the genesis state */
inline next_snapshot() {
    version = SLOTS;
    do
    :: version && !(listed & (1 << version)) -> version--
    :: else -> break
    od;
    genesis(head);
    if
    :: version -> goto get_snapshot
    :: !version && known > 1 -> goto no_snapshot
    :: else -> goto list_log
    fi
}

/* A kill after the last request that changed the store (kills between reads come to the same), and the next start. */
#define killed_and_restarted (restarts && !(me & 1))
inline restart() {
    forget();
    me++; pending = 0;
    goto open
}

inline forget() {
    genesis(head); body.id = 0; body.prev = 0; body.first = 0; body.count = 0;
    version = 0; known = 0; low = 0; shown = 0; base = 0; pending = 0; wants = COMMIT;
    again = false; stale = false; started = false; exists = false
}

proctype incarnation(byte me) {
    Reading head;                 /* reader.head */
    byte version;               /* of head */
    byte known;                 /* reader.floor, while it opens */
    byte low, shown, listed, until, base, pending;
    bool stale, started, exists, again;
    byte wants;
    Commit body;                /* committer._unresolved */

    atomic {
        genesis(head);
        started = STARTED && !(me & 1);
        if
        :: started -> goto follow
        :: else -> goto open
        fi
    }

    /* lake/log/reader.py open: the newest snapshot that the log confirms, and what a LIST shows after it */
open:
    atomic { known = floor; low = 0 }
list_snapshots:                 /* `listed`: their names, as bits */
    atomic {
        low = 0; version = 0; listed = 0;
        do
        :: version < SLOTS ->
            version++;
            if
            :: snapshot[version].id -> listed = listed | (1 << version)
            :: else
            fi
        :: else -> break
        od;
        next_snapshot()
    }
get_snapshot:                   /* lake/log/snapshots.py _read_confirmed: the snapshot, then the log slot of its version */
    atomic {
        listed = listed & ~(1 << version);
        if
        :: snapshot[version].id -> copy(head, snapshot[version]); goto get_confirming
        :: else -> saw(2); next_snapshot()
        fi
    }
get_confirming:
    atomic {
        if
        :: slot[version].id == head.id -> listed = 0; goto list_log
        :: else -> saw(3); next_snapshot()
        fi
    }
no_snapshot:                    /* what was listed may have been reclaimed since */
    atomic {
        check(floor > known, spurious_corrupt);
        saw(4);
        known = floor;
        goto list_snapshots
    }
list_log:                       /* lake/log/reader.py _read_listed */
    atomic {
        if
        :: mutant != 5 -> touch(version + 1)
        :: else
        fi;
        until = version;
        do
        :: until < SLOTS && slot[until + 1].id -> until++
        :: else -> break
        od
    }
get_listed:
    atomic {
        if
        :: version == until -> until = 0; goto confirm_opened
        :: version < until && slot[version + 1].id == 0 -> saw(14); until = 0; goto confirm_opened
        :: version < until && slot[version + 1].id && chains(version + 1) -> extend(slot[version + 1]); goto get_listed
        :: else -> goto broken_chain_opened
        fi
    }
broken_chain_opened:
    atomic {
        saw(5);
        if
        :: floor > known -> known = floor; goto list_snapshots
        :: else -> check(false, spurious_corrupt)
        fi
    }
confirm_opened:
    atomic {
        known = floor;
        if
        :: low && known > low -> saw(6); goto list_snapshots
        :: else
        fi;
        low = 0; known = 0;
        check(head.id == truth[version], readers_agree);
        check(version >= shown, spurious_corrupt);
        shown = version;
        stale = false
    }

    /* commit.py attempt: follow by probing, then rebase on what was found */
follow:
    atomic {
        if
        :: killed_and_restarted -> restart()
        :: true
        fi;
        if
        :: stale -> goto open
        :: !stale && (version == SLOTS || started && base == appends) -> goto done
        :: else
        fi;
        touch(version + 1);
        if
        :: slot[version + 1].id == 0 -> rebase()
        :: slot[version + 1].id && chains(version + 1) -> extend(slot[version + 1]); goto follow
        :: else -> goto broken_chain
        fi;
        if
        :: wants == COMMIT -> goto create
        :: else -> goto trustworthy
        fi
    }
broken_chain:
    atomic {
        check(floor > low, spurious_corrupt);
        saw(7);
        stale = true;
        goto open
    }

    /* sequence.py take_slot; an Unknown comes back to `create` with the same bytes, whatever was appended meanwhile */
create:
    atomic {
        length || own == 0;     /* by symmetry: it is producer 0 that takes the first slot */
        if
        :: slot[version + 1].id == 0 -> land(version + 1, body); goto mine
        :: slot[version + 1].id == 0 && faults ->       /* it lands, a proxy sends it again, and 412 is the answer */
            faults--; land(version + 1, body); exists = true
        :: slot[version + 1].id && slot[version + 1].id != body.id -> exists = true
        :: slot[version + 1].id == body.id -> exists = true
        :: faults && flying[me].id == 0 ->              /* no answer: it lands now, later, or never */
            faults--; exists = false;
            flying[me].id = body.id; flying[me].prev = body.prev; flying[me].first = body.first; flying[me].count = body.count;
            flying_to[me] = version + 1;
            if
            :: started && pending < appends -> pending++
            :: true
            fi
        fi;
        if
        :: mutant == 2 && exists -> goto lost           /* 412 is believed, and the guard by seq is missing */
        :: else
        fi
    }
get_slot:
    atomic {
        if
        :: killed_and_restarted && flying[me].id -> saw(16); restart()
        :: slot[version + 1].id == body.id -> goto mine
        :: slot[version + 1].id && slot[version + 1].id != body.id -> goto lost
        :: slot[version + 1].id == 0 && exists -> saw(8); stale = true; goto lost
        :: slot[version + 1].id == 0 && !exists && mutant == 3 -> goto lost     /* the unresolved create is forgotten */
        :: else -> goto create
        fi
    }
mine:                           /* commit.py _settle_mine: the floor is read last */
    atomic {
        exists = false;
        if
        :: killed_and_restarted -> saw(17); restart()
        :: true
        fi;
        if
        :: low && floor > low && mutant != 6 -> saw(9); stale = true; goto lost
        :: else
        fi;
        check(head.id == truth[version], readers_agree);
        low = 0;
        version++;
        check(truth[version] == body.id, durable);
        version--;
        extend(body);
        shown = version;
        goto advance
    }
lost:
    atomic {
        exists = false;
        body.id = 0; body.prev = 0; body.first = 0; body.count = 0;
        goto follow
    }
trustworthy:                    /* commit.py _trustworthy: a refusal is floor-checked as well */
    atomic {
        if
        :: low && floor > low -> saw(10); stale = true; wants = COMMIT; goto follow
        :: else
        fi;
        low = 0;
        check(head.id == truth[version], readers_agree);
        shown = version;
        if
        :: wants == FENCE -> check(last.live[own] != me, false_fence); saw(11); goto done
        :: else -> goto advance
        fi
    }
advance:                        /* commit_loop.py _advance: by what the log says, never by what was sent */
    atomic {
        wants = COMMIT;
        if
        :: !started ->
            started = true; base = head.next[own]; pending = base;
            check(last.next[own] == base || last.live[own] != me, fencing); /* nobody moves what a start has handed out */
            saw(12)
        :: started && mutant == 4 && body.count -> base = pending       /* everything pending is taken for committed: hazard 5 */
        :: else -> base = head.next[own]; saw(13)
        fi;
        if
        :: pending < base -> pending = base
        :: else
        fi;
        check(last.next[own] >= base, durable);
        body.id = 0; body.prev = 0; body.first = 0; body.count = 0;
        goto follow
    }
done:                           /* nothing of it matters any more: equal for all */
    atomic { forget() }
}

/* ---- requests that nobody waits for any more ---- */

#define arrive(i) atomic { \
        flying[i].id && slot[flying_to[i]].id == 0 -> \
            land(flying_to[i], flying[i]); \
            flying[i].id = 0; flying[i].prev = 0; flying[i].first = 0; flying[i].count = 0; flying_to[i] = 0 \
    }

proctype network() {
end:
    do
    :: arrive(0)
    :: arrive(1)
    :: arrive(2)
    :: arrive(3)
    od
}

/* ---- the reclaimer ---- */

inline find_snapshot() {
    found = to;
    do
    :: found <= version && snapshot[found].id -> goto raise_floor
    :: found <= version && snapshot[found].id == 0 -> found++
    :: found > version -> break
    od;
    found = 0
}

#define deletes(n) atomic { n <= SLOTS && n < (mutant == 7 -> to : floor) && (slot[n].id || snapshot[n].id) -> \
        if \
        :: slot[n].id -> slot[n].id = 0; slot[n].prev = 0; slot[n].first = 0; slot[n].count = 0 \
        :: snapshot[n].id -> snapshot[n].id = 0; snapshot[n].next[0] = 0; snapshot[n].next[1] = 0; \
            snapshot[n].live[0] = 0; snapshot[n].live[1] = 0 \
        fi \
    }

proctype reclaimer() {
    Reading state;                /* reader.state: what `open` above makes of the log, which is the truth of some moment */
    byte version, to, runs, found;

end_open:                       /* run.py reclaim; which step is needed is groups.pml's question: any version may be `to` */
    atomic {
        runs < rounds && length > floor ->
            runs++;
            copy(state, last); version = length; to = version;
            do
            :: to > floor + 1 -> to--
            :: break
            od;
            if
            :: mutant == 7 -> goto delete               /* deletes first, and tells afterwards */
            :: else
            fi
    }
look_for_snapshot:              /* run.py _ensure_snapshot; nobody else writes or deletes one, so one look is one step */
    atomic {
        if
        :: mutant == 8 -> goto raise_floor
        :: else
        fi;
        find_snapshot()
    }
write_snapshot:
    atomic { copy(snapshot[version], state) }
raise_floor:                    /* run.py _advance */
    atomic { floor = to; saw(15) }
delete:                         /* run.py _sweep: in any order, and a kill leaves any part of it */
    do
    :: deletes(1)
    :: deletes(2)
    :: deletes(3)
    :: deletes(4)
    :: atomic { mutant == 7 -> floor = to; genesis(state); version = 0; to = 0; goto end_open }
    :: atomic { mutant != 7 -> genesis(state); version = 0; to = 0; goto end_open }
    od
}

init {
    atomic {
        c_code {
            now.mutant = bound("MUTANT", 0);
            now.witness = bound("WITNESS", 0);
            now.only = bound("PROPERTY", 0);
            now.processes = bound("PROCESSES", 15);     /* which incarnations run, as bits */
            now.restarts = bound("RESTARTS", 0);        /* a process that is killed goes on as the next incarnation */
            now.appends = bound("APPENDS", 1);          /* records of one producer */
            now.rounds = bound("ROUNDS", 1);            /* times that the reclaimer raises the floor */
            now.faults = bound("FAULTS", 1);
        };
        genesis(last);
        if
        :: processes & 1 -> run incarnation(0)
        :: else
        fi;
        if
        :: processes & 2 -> run incarnation(1)
        :: else
        fi;
        if
        :: processes & 4 -> run incarnation(2)
        :: else
        fi;
        if
        :: processes & 8 -> run incarnation(3)
        :: else
        fi;
        run network(); run reclaimer()
    }
}

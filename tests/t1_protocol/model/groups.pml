/* Groups and reclaim: what a group's writer does, request by request, beside reclaimers that give steps up.

   One atomic step is one store request with the local work that follows it; everything between two requests interleaves
   with everything else. A process may stand still for ever at any point: that is how it is killed or frozen.

   processes  writer       fs/stepfs/lake/group_sequence.py (write and what it calls) with retention.py
              reclaimer    fs/stepfs/lake/reclaim/{run,plan,groups}.py, of which only what concerns steps; log.pml has the other half
              network      requests whose caller gave up on them, and which land later or never
   numbers    slots of groups and of the floor count from 1 here (from 0 in the code); `STEPS` steps are committed
   sets       kept checkpoints are bits: bit k is a checkpoint whose next step is k
   mutants, witnesses   as in log.pml

   Left out: the log (steps are numbers), --keep above 1, `drop` and `replace`, grace, LISTs of more than one page. */

#ifndef STEPS
#define STEPS 2
#endif
#ifndef SLOTS
#define SLOTS 4         /* of a group */
#endif
#ifndef FLOORS
#define FLOORS 5        /* floor records */
#endif
#ifndef OPERATIONS
#define OPERATIONS 3    /* of one writer, at most */
#endif

#define WRITERS 2
#define PROCESSES 4     /* writers 0 and 1, reclaimers 2 and 3 */
#define TOP (SLOTS + 1)
#define GROUPS 2
#define NEVER (STEPS + 1)
#define RECORD(me, operation, withdraws) (1 + 2 * (OPERATIONS * (me) + (operation)) + (withdraws))
#define bit(step) (1 << (step))
#define least(kept, start) ((kept) & 1 -> 0 : ((kept) & 2 -> 1 : ((kept) & 4 -> 2 : ((kept) & 8 -> 3 : (start)))))
#define from(step) (~(bit(step) - 1) & (bit(STEPS + 1) - 1))

#define REGISTER 0      /* operations of a writer */
#define ADD 1
#define HOOK 2          /* add with --keep 1 */
#define RETIRE 3

c_decl {
    static int bound(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
};

mtype = { needed_deleted, promised_gone, spurious_corrupt, floor_monotone };

byte mutant, witness, processes, home, calls, rounds;         /* the bounds: see init */
byte operations[2];
mtype violated;                                 /* never set: it makes pan print the number of the property */
byte only;                                      /* the one property to check; 0: all of them */
#define check(condition, property) assert((condition) || (only && only != property) || violated == property)
#define saw(number) assert(witness != number)

/* ---- the store ---- */

typedef Record { byte id; byte kept; byte start; bool retired };        /* id 0: absent */
typedef Sequence { Record slot[TOP] };
typedef Floor { byte number; byte closing; byte live };

Sequence group[GROUPS];         /* consumers/<group>/<n> */
byte floor_id[FLOORS + 1];      /* floor/<n>: who wrote it; slots are dense and never deleted */
Floor newest;                   /* its newest record: what a refresh finds, whose last request is the one that misses */
byte gone;                      /* steps below are deleted */

byte faults;                    /* ambiguous creates still to come, in all */
Record flying[WRITERS];         /* a create without an answer that has not landed yet */
byte flying_to[WRITERS];
Floor late_floor;               /* the same of a floor record; number 0: none */
byte late_floor_id;

/* ---- what users were promised: the checkpoints that calls returned for, until a call that drops them begins ---- */

byte promised[GROUPS];
byte promised_start[GROUPS];    /* by register, of a group that keeps no checkpoint yet; NEVER: none */
byte dropping[WRITERS];         /* steps below may be dropped by a call that has begun, or by its late request */
bool raising[WRITERS];          /* the same of a group that keeps no checkpoint yet: its first one is being added */
bool busy[WRITERS];

inline copy(to, given) { to.id = given.id; to.kept = given.kept; to.start = given.start; to.retired = given.retired }
inline clear(to) { to.id = 0; to.kept = 0; to.start = 0; to.retired = false }
inline copy_floor(to, given) { to.number = given.number; to.closing = given.closing; to.live = given.live }

/* A floor record reaches an absent slot: the next one. */
inline land_floor(author, record_closing, record_live) {
    check(record_live >= newest.live, floor_monotone);
    newest.number++; newest.closing = record_closing; newest.live = record_live;
    floor_id[newest.number] = author
}

/* register writes nothing if what it wants stands there already, so it stops no request of ours that is still on its way. */
#define dropped_by(w, its_group, step, is_start) (g == its_group && (me != w || operation == REGISTER && !landed && !lost) && \
    (dropping[w] > (step) || (is_start) && raising[w]))

inline promise(step, is_start) {
    if
    :: dropped_by(0, 0, step, is_start) || dropped_by(1, home, step, is_start) -> skip
    :: else ->
        check(step >= newest.live && step >= gone, promised_gone);
        if
        :: is_start -> promised_start[g] = step
        :: else -> promised[g] = promised[g] | bit(step)
        fi
    fi
}

/* ---- a group's writer ---- */

/* group_sequence.py newest: a LIST; `number` is the greatest slot, 0 for none */
inline greatest(into) {
    into = SLOTS;
    do
    :: into && group[g].slot[into].id == 0 -> into--
    :: else -> break
    od
}

/* retention.py surviving */
inline survive() {
    copy(old, found);
    if
    :: old.id && !old.retired && least(old.kept, old.start) < floor.live ->
        old.kept = old.kept & from(floor.live);
        old.start = (old.start > floor.live -> old.start : floor.live)
    :: else
    fi
}

/* consumers.py register, add, retire: the next record */
inline change() {
    copy(record, old);
    if
    :: old.id == 0 || old.retired ->
        if
        :: operation != RETIRE -> clear(record); record.start = floor.live
        :: else
        fi
    :: else
    fi;
    if
    :: operation == ADD -> record.kept = record.kept | bit(step)
    :: operation == HOOK -> record.kept = (record.kept | bit(step)) & from(step)
    :: operation == RETIRE -> record.retired = true
    :: else
    fi
}

/* group_sequence.py _gone; `step` is NEVER for calls that bring none */
inline judge() {
    late = !record.retired && (step < floor.live || joins && least(record.kept, record.start) < floor.live)
}

/* What a call vouches for: what it brings, and all that the group needs if the call, or register, made it exist. */
#define same(one, other) (one.kept == other.kept && one.start == other.start && one.retired == other.retired)
#define relied ((operation == REGISTER || joins) && least(record.kept, record.start) < step -> \
    least(record.kept, record.start) : step)
#define safe (record.retired || relied >= floor.closing)

/* Who says a checkpoint takes a slot, or loses it to somebody: see group_sequence.py _write, `fences`. */
#define believes (operation == REGISTER || lost || landed || mutant == 10)

inline decide() {
    survive();
    if
    :: found.id != RECORD(me, done, 0) -> copy(former, old) /* what an undo restores: the set that our record replaces */
    :: else
    fi;
    if
    :: !landed -> joins = (old.id == 0 || old.retired)
    :: else
    fi;
    change();
    record.id = RECORD(me, done, 0);
    judge();
    if
    :: operation == RETIRE && old.id == 0 -> goto finished              /* AbsentError */
    :: mutant == 6 && operation == REGISTER && found.id && !found.retired -> copy(record, found); goto success
    :: else
    fi;
    if
    :: late -> goto withdraw
    :: !late && found.id && same(record, found) && believes -> saw(1); goto list_equal
    :: else -> clear(found); clear(old); goto create
    fi
}

inline forget_operation() {     /* what is left is the trimming, below `number` */
    clear(found); clear(old); clear(former); clear(record);
    floor.number = 0; floor.closing = 0; floor.live = 0;
    operation = 0; step = 0; landed = false; lost = false; late = false; joins = false; exists = false; withdraws = false
}

inline forget() { forget_operation(); number = 0; to_trim = 0 }

proctype writer(byte me; byte g) {
    Floor floor;
    Record found, old, former, record;
    byte number, done, operation, step, to_trim;
    bool landed, lost, late, joins, exists, withdraws;

again:
    atomic {
        if
        :: done == operations[me] -> goto ended
        :: else
        fi;
        if
        :: calls & 1 -> operation = REGISTER
        :: calls & 2 -> operation = ADD
        :: calls & 4 -> operation = HOOK
        :: calls & 8 -> operation = RETIRE
        fi;
        busy[me] = true; step = NEVER;
        if
        :: home == 0 && !busy[1 - me] && flying[1 - me].id == 0 -> dropping[1 - me] = 0; raising[1 - me] = false
        :: else
        fi;
        if
        :: operation == ADD || operation == HOOK ->
            if
            :: step = 0
            :: step = 1
            :: step = 2
            fi
        :: else
        fi;
        if
        :: operation == HOOK ->
            promised[g] = promised[g] & (from(step)); promised_start[g] = NEVER;
            dropping[me] = (dropping[me] > step -> dropping[me] : step); raising[me] = true
        :: operation == ADD -> promised_start[g] = NEVER; raising[me] = true
        :: operation == RETIRE -> promised[g] = 0; promised_start[g] = NEVER; dropping[me] = NEVER; raising[me] = true
        :: else
        fi;
        goto begin
    }
begin:                          /* group_sequence.py _write */
    atomic { copy_floor(floor, newest) }
list:
    atomic {
        greatest(number);
        if
        :: number -> goto get
        :: else -> clear(found); decide()
        fi
    }
list_equal:                     /* group_sequence.py _place: the slot may have been trimmed, and taken again, since the LIST */
    atomic {
        greatest(to_trim);
        if
        :: to_trim != number -> to_trim = 0; goto not_ours
        :: else -> to_trim = 0; goto look_at_floor
        fi
    }
get:
    atomic {
        if
        :: group[g].slot[number].id -> copy(found, group[g].slot[number]); decide()
        :: else ->                                      /* trimmed since: there must be a greater one by now */
            saw(2); found.id = number; greatest(number);
            check(number > found.id, spurious_corrupt); found.id = 0;
            goto get
        fi
    }
create:                         /* sequence.py take_slot; `withdraws` says who asked for it */
    atomic {
        if
        :: number == SLOTS -> goto ended                /* the bound of this model */
        :: else
        fi;
        if
        :: group[g].slot[number + 1].id == 0 -> copy(group[g].slot[number + 1], record); goto list_again
        :: group[g].slot[number + 1].id -> exists = true
        :: faults && flying[me].id == 0 ->              /* no answer: it lands now, later, or never */
            faults--; exists = false; copy(flying[me], record); flying_to[me] = number + 1
        fi
    }
get_slot:
    atomic {
        if
        :: group[g].slot[number + 1].id == record.id -> exists = false; goto list_again
        :: group[g].slot[number + 1].id && group[g].slot[number + 1].id != record.id -> goto not_ours
        :: group[g].slot[number + 1].id == 0 && exists -> saw(3); goto not_ours
        :: group[g].slot[number + 1].id == 0 && !exists -> goto create
        :: group[g].slot[number + 1].id == 0 && !exists -> goto failed  /* StoreUnreachableError */
        fi
    }
not_ours:
    atomic {
        exists = false;
        if
        :: withdraws -> goto withdraw
        :: else -> lost = true; goto begin
        fi
    }
list_again:                     /* group_sequence.py _take: only the greatest slot counts */
    atomic {
        landed = true; greatest(to_trim);
        if
        :: to_trim != number + 1 && mutant != 4 -> saw(4); to_trim = 0; goto not_ours
        :: else -> to_trim = 0; number++
        fi;
        if
        :: withdraws -> saw(5); forget_operation(); goto trim
        :: mutant == 2 && !withdraws -> goto success    /* the floor is not read after the record */
        :: else -> goto look_at_floor
        fi
    }
look_at_floor:
    atomic {
        copy_floor(floor, newest);
        judge();
        if
        :: late -> goto withdraw
        :: !late && (safe || mutant == 5) -> goto success       /* mutant 5: what was there before is believed */
        :: !late && !safe && mutant != 5 && relied < floor.live && mutant != 9 -> saw(8); goto begin
        :: else -> goto take_back
        fi
    }
take_back:                      /* floor.py take_back: no reclaimer that has not seen our record goes on */
    atomic {
        if
        :: newest.number == FLOORS -> goto ended        /* the bound of this model */
        :: newest.number < FLOORS && newest.number == floor.number ->
            land_floor(me, floor.live, floor.live); saw(6); goto success
        :: newest.number != floor.number -> goto taken_by_another
        :: faults && newest.number < FLOORS && newest.number == floor.number ->
            faults--;                                   /* no answer, and nothing to be read: it may have landed */
            if
            :: land_floor(me, floor.live, floor.live)
            :: true
            fi;
            goto begin
        fi
    }
taken_by_another:             /* group_sequence.py _is_safe */
    atomic {
        copy_floor(floor, newest);
        if
        :: relied >= floor.live -> saw(7); goto success
        :: else -> saw(19); goto begin
        fi
    }
success:
    atomic {
        if
        :: operation == REGISTER -> promise(least(record.kept, record.start), record.kept == 0); saw(9)
        :: operation == ADD || operation == HOOK -> promise(step, false); saw(10)
        :: else -> saw(11)
        fi;
        if
        :: landed -> landed = false; forget_operation(); goto trim
        :: else -> goto finished
        fi
    }
withdraw:                       /* group_sequence.py _withdraw */
    atomic {
        withdraws = true; clear(old); clear(found);
        greatest(number);
        if
        :: number == 0 -> goto finished
        :: else
        fi
    }
get_to_withdraw:
    atomic {
        if
        :: group[g].slot[number].id == 0 -> goto withdraw
        :: else -> copy(found, group[g].slot[number])
        fi;
        if
        :: found.retired -> goto finished
        :: !found.retired && landed && found.id == RECORD(me, done, 0) ->
            saw(12);
            if
            :: former.id == 0 || former.retired ->
                if
                :: former.id -> copy(record, former)
                :: else -> copy(record, found)
                fi;
                record.retired = true
            :: else -> copy(record, former)
            fi
        :: !found.retired && found.id != RECORD(me, done, 0) && step <= STEPS && (found.kept & bit(step)) ->
            saw(13);
            copy(record, found); record.kept = record.kept & ~bit(step);
            if
            :: record.kept == 0 -> record.kept = former.kept
            :: else
            fi
        :: else -> goto finished
        fi;
        record.id = RECORD(me, done, 1);
        clear(found);
        goto create
    }
trim:                           /* group_sequence.py _trim: a LIST, then what is below `number`, in any part */
    atomic {
        to_trim = (mutant == 7 -> number + 1 : number); number = 1
    }
trim_one:
    atomic {
        if
        :: number < to_trim && group[g].slot[number].id == 0 -> number++; goto trim_one
        :: number < to_trim && group[g].slot[number].id -> clear(group[g].slot[number]); number++; goto trim_one
        :: number == to_trim -> goto finished
        fi
    }
finished:                       /* it returned or raised, and nothing of it is on its way */
    atomic {
        if
        :: flying[me].id == 0 && !(home == 0 && busy[1 - me]) -> dropping[me] = 0; raising[me] = false
        :: else
        fi
    }
failed:
    atomic { done++; busy[me] = false; forget(); goto again }
ended:
    atomic { forget(); done = 0 }
}

/* ---- the reclaimer ---- */

/* reclaim/groups.py GroupWatch.look: one LIST, then the newest record of each group, unless it was read before */
inline list_groups() {
    which = 0; certain = true;
    do
    :: which < GROUPS ->
        number[which] = SLOTS;
        do
        :: number[which] && group[which].slot[number[which]].id == 0 -> number[which]--
        :: else -> break
        od;
        if
        :: number[which] == known[which] -> number[which] = 0
        :: else -> certain = false
        fi;
        which++
    :: else -> break
    od;
    which = 0
}

inline get_group() {
    if
    :: number[which] == 0 -> which++
    :: number[which] && group[which].slot[number[which]].id ->
        known[which] = number[which]; number[which] = 0;
        needs[which] = (group[which].slot[known[which]].retired -> NEVER : \
            least(group[which].slot[known[which]].kept, group[which].slot[known[which]].start));
        which++
    :: else ->                                          /* trimmed since: what replaced it */
        saw(14); i = number[which]; number[which] = SLOTS;
        do
        :: number[which] && group[which].slot[number[which]].id == 0 -> number[which]--
        :: else -> break
        od;
        check(number[which] > i, spurious_corrupt); i = 0
    fi
}

#define need (needs[0] < needs[1] -> needs[0] : needs[1])

/* sequence.py take_slot on the slot after the newest record known; an Unknown ends the run */
inline append_floor(live_then) {
    closes = to;
    if
    :: newest.number == FLOORS -> goto ended
    :: newest.number < FLOORS && newest.number == floor.number ->
        land_floor(me, closes, live_then);
        copy_floor(floor, newest); closes = 0
    :: newest.number < FLOORS && newest.number != floor.number -> closes = 0; saw(15); goto again
    :: faults && newest.number < FLOORS && newest.number == floor.number && late_floor.number == 0 ->
        faults--;
        late_floor.number = floor.number + 1; late_floor.closing = closes; late_floor.live = live_then;
        late_floor_id = me; closes = 0;
        goto again
    fi
}

proctype reclaimer(byte me) {
    Floor floor;
    byte number[GROUPS], known[GROUPS], needs[GROUPS], which, to, closes, i, runs;
    bool certain;

again:
    atomic {
        floor.number = 0; floor.closing = 0; floor.live = 0; number[0] = 0; number[1] = 0; which = 0; to = 0;
        certain = false;
        needs[0] = (known[0] -> needs[0] : NEVER); needs[1] = (known[1] -> needs[1] : NEVER);   /* what was read once is known */
        if
        :: runs == rounds -> goto ended
        :: else -> runs++
        fi
    }
    atomic { copy_floor(floor, newest) }                /* run.py reclaim: LogReader.open */
    atomic { list_groups() }
get_first:
    atomic {
        get_group();
        if
        :: which < GROUPS -> goto get_first
        :: else
        fi;
        to = need; which = 0;
        if
        :: to == NEVER -> goto again                     /* plan.py least_need: no live group */
        :: to < floor.live -> saw(16); goto again        /* plan.py least_need: RefusedError */
        :: to != NEVER && to == floor.live -> goto sweep
        :: else -> skip
        fi
    }
close:                          /* run.py _advance */
    atomic {
        if
        :: mutant == 8 -> goto list_second              /* nothing is announced */
        :: else
        fi;
        append_floor(floor.live)
    }
list_second:
    atomic {
        if
        :: mutant == 1 -> goto advance                  /* no second look */
        :: else -> list_groups()
        fi
    }
get_second:
    atomic {
        get_group();
        if
        :: which < GROUPS -> goto get_second
        :: else
        fi;
        which = 0;
        if
        :: need < to -> saw(17); goto again             /* run.py _lets_go */
        :: need >= to && !certain && mutant != 11 -> saw(20); goto list_second
        :: else
        fi
    }
advance:
    atomic {
        if
        :: mutant == 3 -> copy_floor(floor, newest)     /* not the slot directly after its own closing record */
        :: else
        fi;
        append_floor(to)
    }
sweep:                          /* run.py _sweep, after another LogReader.open */
    atomic {
        copy_floor(floor, newest)
    }
    atomic {
        if
        :: floor.live > gone ->
            gone = floor.live; saw(18);
            check((promised[0] & ~from(gone)) == 0 && promised_start[0] >= gone, needed_deleted);
            check((promised[1] & ~from(gone)) == 0 && promised_start[1] >= gone, needed_deleted)
        :: else
        fi;
        goto again
    }
ended:
    atomic {
        runs = 0; floor.number = 0; floor.closing = 0; floor.live = 0; number[0] = 0; number[1] = 0; which = 0; to = 0;
        known[0] = 0; known[1] = 0; needs[0] = 0; needs[1] = 0; certain = false
    }
}

/* ---- requests that nobody waits for any more ---- */

#define arrive(w, g) atomic { \
        flying[w].id && group[g].slot[flying_to[w]].id == 0 -> \
            copy(group[g].slot[flying_to[w]], flying[w]); clear(flying[w]); flying_to[w] = 0 \
    }

proctype network() {
end:
    do
    :: arrive(0, 0)
    :: arrive(1, home)
    :: atomic {
        late_floor.number && newest.number + 1 == late_floor.number ->
            land_floor(late_floor_id, late_floor.closing, late_floor.live);
            late_floor.number = 0; late_floor.closing = 0; late_floor.live = 0; late_floor_id = 0
       }
    od
}

#define HISTORY 255     /* the author of what stands there at the start */

init {
    atomic {
        c_code {
            now.mutant = bound("MUTANT", 0);
            now.witness = bound("WITNESS", 0);
            now.processes = bound("PROCESSES", 7);      /* which processes run, as bits */
            now.home = bound("HOME_OF_1", 1);                /* writer 1's group */
            now.operations[0] = bound("OPERATIONS_OF_0", 1);    /* at most OPERATIONS */
            now.operations[1] = bound("OPERATIONS_OF_1", 1);
            now.calls = bound("CALLS", 15);             /* which operations a writer may call, as bits */
            now.only = bound("PROPERTY", 0);
            now.rounds = bound("ROUNDS", 1);            /* of one reclaimer */
            now.faults = bound("FAULTS", 1);
        };
        promised_start[0] = NEVER; promised_start[1] = NEVER;
        group[1].slot[1].id = HISTORY; group[1].slot[1].kept = bit(STEPS); promised[1] = bit(STEPS);
        if
        :: true
        :: group[0].slot[1].id = HISTORY; promised_start[0] = 0
        :: group[0].slot[1].id = HISTORY; group[0].slot[1].kept = bit(1); promised[0] = bit(1)
        fi;
        if
        :: processes & 1 -> run writer(0, 0)
        :: else
        fi;
        if
        :: processes & 2 -> run writer(1, home)
        :: else
        fi;
        if
        :: processes & 4 -> run reclaimer(2)
        :: else
        fi;
        if
        :: processes & 8 -> run reclaimer(3)
        :: else
        fi;
        run network()
    }
}

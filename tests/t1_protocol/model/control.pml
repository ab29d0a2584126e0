/* The control sequence: what a group's writer, a reclaimer and a repair do with it, request by request.
   One atomic step is one store request with the local work that follows it; everything between two requests interleaves
   with everything else. A process may stand still for ever at any point: that is how it is killed or frozen.

   processes  writer       lake/control.py `change`: the calls of one caller, which may begin a new life between two
              reclaimer    lake/reclaim/run.py, of which only what concerns steps; log.pml has the other half
              repair       lake/verify/repair.py, after the newest record has become unreadable
              network      creates whose caller gave up on them, and which land later or never
              table        every result of `decide`, for decision_table.py, which compares them with lake/decisions.py
   numbers    slots count from 1 here (from 0 in the code). They never change, so what a process has read is a number
   sets       bit k is a checkpoint whose next step is k; bit 3 stands for the start of a group that keeps none
   requests   Hook: Add with keep 1. Replace: a Revise that revives; Revise does not. `what` they are about is
              one checkpoint, for both kinds of Revise a set, and for Advance a step. Mutants, witnesses: as in log.pml
   Left out: the log (steps are numbers), --keep above 1 and so the order of recording, forks. */
#ifndef SLOTS
#define SLOTS 5
#endif
#define ABSENT 3        /* in place of a start: there is no such group */
c_decl { static int bound(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; } };
mtype = { needed_deleted, promised_gone, promise_undone, need_below_live, grace_broken, floor_monotone };
mtype:request = { ADVANCE, RETIRE, DROP, REVISE, REPLACE, HOOK, RESUME, ADD, REGISTER };    /* counted from the end */
mtype:verdict = { REFUSED, NEXT, SAME };
byte mutant, witness, processes, home, rounds, operations[2], only;     /* the bounds: see init */
short calls;                    /* the requests of writers, as bits */
mtype violated;                 /* never set: it makes pan print the number of the property; `only` checks one of them */
#define check(condition, property) assert((condition) || (only && only != property) || violated == property)
#define saw(number) assert(witness != number)
/* until[s]: of the minima, which record ended the last one whose need was s; 0: none that still counts */
typedef Record { byte id; byte live; byte kept[2]; byte start[2]; byte until[2] };
Record slot[SLOTS + 2];
hidden Record next; hidden byte verdict, i;     /* scratch of `decide` */
byte top = 1, damaged, gone;    /* the newest; the one that is unreadable, 0: none; steps below are deleted */
byte faults, sent[4], sent_id[4], sent_op[4], sent_what[4]; /* creates without an answer, on their way to slot sent[caller] */
bool busy[2], sweeps[2];        /* writers 0 and 1 are in a call; reclaimers 2 and 3 are about to delete */
byte call_op[2], call_what[2], spoiled[2];  /* that call, and what it cannot promise, since another one may drop it */
byte promised[2], promised_start[2];        /* of a group: what calls returned for, until a call that may drop it begins */
#define least(kept, otherwise) ((kept) & 1 -> 0 : ((kept) & 2 -> 1 : ((kept) & 4 -> 2 : (otherwise))))
#define need_of(r, g) least(r.kept[g], r.start[g])
#define least_of(a, b, r) (a < b -> a : (b < ABSENT -> b : r.live))
#define need(r) least_of(need_of(r, 0), need_of(r, 1), r)
#define max(a, b) ((a) > (b) -> (a) : (b))
#define takes (op >= ADD && op <= DROP)
#define fences(op) (op < REPLACE)
#define drops(op, what) (op == REGISTER -> 0 : (op == ADD || op == RESUME -> 8 : (op == RETIRE -> 15 : \
    8 | (op == HOOK -> (what) - 1 : (op == DROP -> (what) : 7 & ~(what))))))
#define ID(call) (4 * me + call + 1)
#define may_create (number < SLOTS && top == number)
inline copy(into, other) {
    into.id = other.id; into.live = other.live; into.kept[0] = other.kept[0]; into.kept[1] = other.kept[1];
    into.start[0] = other.start[0]; into.start[1] = other.start[1]; into.until[0] = other.until[0]; into.until[1] = other.until[1] }
inline succeed(n) {             /* decisions.py successor: the minima of `next`, which was made of slot `n` */
    if :: need(slot[n]) < 2 -> next.until[need(slot[n])] = (mutant == 8 -> n : n + 1) :: else fi;
    if :: next.live -> next.until[1] = max(next.until[0], next.until[1]); next.until[0] = 0 :: else fi;
    next.until[0] = (need(next) > 0 && mutant != 7 -> next.until[0] : 0);
    next.until[1] = (need(next) > 1 && next.live < 2 && mutant != 7 -> next.until[1] : 0) }
inline decide(n, g, asks, given) {
    copy(next, slot[n]); verdict = NEXT;
    if :: asks == ADVANCE -> next.live = (given > next.live && given <= need(next) -> given : next.live)
    :: asks < REVISE && next.start[g] == ABSENT -> next.start[g] = next.live
    :: asks > REVISE && asks < ADVANCE && next.start[g] == ABSENT || asks == DROP && !(next.kept[g] & given) -> verdict = REFUSED
    :: else fi;
    if :: asks == ADD || asks == RESUME -> next.kept[g] = next.kept[g] | given
    :: asks == HOOK -> next.kept[g] = (next.kept[g] | given) & ~(given - 1)
    :: asks == RETIRE -> next.kept[g] = 0; next.start[g] = ABSENT
    :: (asks == REPLACE || asks == REVISE || asks == DROP) && next.start[g] != ABSENT ->
        next.start[g] = ((asks == DROP -> next.kept[g] & ~given : given) -> next.start[g] : need_of(next, g));
        next.kept[g] = (asks == DROP -> next.kept[g] & ~given : given)
    :: else fi;
    if :: verdict == REFUSED
    :: verdict == NEXT && next.live == slot[n].live && next.start[g] == slot[n].start[g] && next.kept[g] == slot[n].kept[g] ->
        verdict = SAME
    :: else -> verdict = (next.start[g] != ABSENT && need_of(next, g) < next.live && mutant != 1 -> REFUSED : NEXT) fi;
    succeed(n) }
inline land(author) {           /* `next` takes the free slot; what else was on its way to it is lost */
    check(next.live >= slot[top].live || damaged == top, floor_monotone); check(need(next) >= next.live, need_below_live);
    check(!(promised[0] & ~next.kept[0] || promised[1] & ~next.kept[1]), promise_undone);
    check(need_of(next, 0) <= promised_start[0] && need_of(next, 1) <= promised_start[1], promise_undone);
    top++; next.id = author; copy(slot[top], next);
    for (i : 0 .. 3) { if :: sent[i] == top -> sent[i] = 0; sent_id[i] = 0; sent_op[i] = 0; sent_what[i] = 0 :: else fi } i = 0 }
inline send(author, asks, given) { faults--; sent[me] = top + 1; sent_id[me] = author; sent_op[me] = asks; sent_what[me] = given }
inline arrive(n, g) { decide(top, g, sent_op[n], sent_what[n]); land(sent_id[n]) }
proctype network() {
end: do :: atomic { sent[0] -> arrive(0, 0) } :: atomic { sent[1] -> arrive(1, home) }
    :: atomic { sent[2] -> arrive(2, 0) } :: atomic { sent[3] -> arrive(3, 0) } od }
inline begin() {                /* what this call may drop is promised no more, nor by a call beside it, and the reverse */
    busy[me] = true; call_op[me] = op; call_what[me] = what;
    promised[g] = promised[g] & ~drops(op, what); promised_start[g] = (drops(op, what) -> ABSENT : promised_start[g]);
    if :: home == 0 ->
        spoiled[1 - me] = (busy[1 - me] -> spoiled[1 - me] | drops(op, what) : 0);
        spoiled[me] = (busy[1 - me] -> drops(call_op[1 - me], call_what[1 - me]) : 0) |
            (sent[1 - me] -> drops(sent_op[1 - me], sent_what[1 - me]) : 0)
    :: else fi }
inline promise(n) {             /* a call returns: it vouches for its checkpoints, or for the start of a group without any */
    if :: !fences(op) && reborn && sent[me] -> spoiled[me] = spoiled[me] | drops(sent_op[me], sent_what[me]) :: else fi;
    if :: op >= ADD && op <= REVISE && slot[n].start[g] != ABSENT -> saw(1);
        check(least(what & ~spoiled[me], 7) >= max(slot[n].live, gone), promised_gone); promised[g] = promised[g] | what & ~spoiled[me]
    :: op == REGISTER && slot[n].kept[g] == 0 && spoiled[me] < 8 -> saw(2);
        check(slot[n].start[g] >= max(slot[n].live, gone), promised_gone); promised_start[g] = slot[n].start[g]
    :: else fi }
proctype writer(byte me; byte g) {
    byte number, op, what, done; bool fenced, unanswered, reborn;
again: atomic {
        number = 0; op = 0; what = 0; fenced = false; busy[me] = false; call_op[me] = 0; call_what[me] = 0; spoiled[me] = 0;
        if :: done == operations[me] -> goto ended :: else -> done++ fi;
        if :: sent[me] -> reborn = true; unanswered = false     /* killed, and started again */
        :: unanswered :: !unanswered -> reborn = reborn && sent[me] fi;
        if :: calls & 1 -> op = REGISTER :: calls & 2 -> op = ADD :: calls & 4 -> op = RESUME :: calls & 8 -> op = HOOK
        :: calls & 16 -> op = REPLACE :: calls & 32 -> op = REVISE :: calls & 64 -> op = DROP
        :: calls & 128 -> op = RETIRE fi;
        if :: takes -> what = 1 :: takes -> what = 2 :: takes -> what = 4 :: !takes fi;
        begin(); if :: !unanswered || mutant == 4 -> goto read :: else fi }
    atomic {                    /* control.py _settle: the same bytes, to the same slot */
        if :: sent[me] -> saw(3); arrive(me, g) :: sent[me] -> goto again :: sent[me] == 0 -> saw(4) fi; unanswered = false }
read: atomic {
        number = top;
        if :: damaged == top -> saw(5); goto again :: else -> decide(number, g, op, what) fi;   /* CorruptError */
        if :: verdict == REFUSED -> saw(6); goto again          /* nothing was written */
        :: verdict == SAME && (!fences(op) || fenced || mutant == 3) -> saw(7); promise(number); goto again
        :: verdict == NEXT || verdict == SAME && fences(op) fi }
create: atomic {
        if :: number == SLOTS -> done = operations[me]; goto again      /* the bound of this model */
        :: may_create -> decide(number, g, op, what); land(ID(done)); promise(top); goto again
        :: may_create && faults && !sent[me] -> send(ID(done), op, what)        /* no answer: it lands now, later, or never */
        :: top > number -> saw(8); fenced = true; goto read fi }
    atomic {                    /* sequence.py take_slot: it reads the slot */
        if :: top > number && slot[number + 1].id == ID(done) && damaged != number + 1 -> saw(9); promise(number + 1); goto again
        :: top > number && (slot[number + 1].id != ID(done) || damaged == number + 1) -> fenced = true; goto read
        :: top == number -> arrive(me, g); promise(top); goto again
        :: top == number -> saw(10); unanswered = true; goto again fi }         /* StoreUnreachableError */
ended: atomic { done = 0; unanswered = false; reborn = false } }
/* Grace: every record counts that was the newest after `since`, which is the newest one older than the grace. */
inline check_grace(n) {
    verdict = SAME; for (i : since .. n) { if :: to > max(need(slot[i]), slot[n].live) -> verdict = REFUSED :: else fi }
    check(verdict != REFUSED, grace_broken); i = 0 }
proctype reclaimer(byte me) {
    byte number, to, since, runs;
again: atomic {
        number = 0; to = 0; since = 0; sweeps[me - 2] = false;
        if :: runs == rounds -> goto ended :: else -> runs++ fi }
    atomic {
        number = top; since = number;
        if :: damaged == top -> saw(11); goto again :: else fi; do :: since > 1 -> since-- :: break od;
        to = (slot[number].until[0] > since -> 0 : (slot[number].until[1] > since -> 1 : need(slot[number]))); check_grace(number);
        if :: to == slot[number].live -> goto look :: to != slot[number].live && mutant == 5 -> goto delete :: else fi }
create: atomic {
        if :: number == SLOTS -> goto again
        :: may_create -> check_grace(number); decide(number, 0, ADVANCE, to); land(ID(runs)); saw(12)
        :: may_create && faults && !sent[me] -> send(ID(runs), ADVANCE, to); goto again
        :: top > number && mutant == 2 && top < SLOTS -> copy(next, slot[top]); next.live = to; land(ID(runs))
        :: top > number && mutant == 6 -> decide(top, 0, ADVANCE, to); number = (verdict == NEXT -> top : SLOTS); goto create
        :: top > number && mutant != 2 && mutant != 6 -> saw(13); goto again fi }
look: atomic {
        number = 0; since = 0; to = slot[top].live;
        if :: damaged == top || to <= gone -> goto again :: else -> sweeps[me - 2] = true fi }
delete: atomic {                /* or it is killed before, or on its way */
        if :: gone < to -> gone = to; saw(14) :: gone + 1 < to -> gone++; saw(15) :: true fi;
        check(least(promised[0], promised_start[0]) >= gone && least(promised[1], promised_start[1]) >= gone, needed_deleted);
        goto again }
ended: atomic { runs = 0 } }
#define vouches(r, g) (r.start[g] != ABSENT && need_of(r, g) <= promised_start[g])
inline waive(g) {               /* what the newest record changed is lost, and so reported */
    promised[g] = promised[g] & slot[top - 1].kept[g]; promised_start[g] = (vouches(slot[top - 1], g) -> promised_start[g] : ABSENT) }
proctype repair() {
    byte evidence;
end_rot: atomic { top > 1; damaged = top; waive(0); waive(1) }
end_look: atomic { (!sweeps[0] && !sweeps[1]) || mutant == 11; evidence = (mutant == 9 -> 0 : gone) }   /* no reclaim runs */
    atomic {
        if :: top < SLOTS && (top == damaged || mutant == 10) ->
            copy(next, slot[damaged - 1]); next.live = max(next.live, evidence);
            next.until[0] = (next.live == 0 && need(next) > 0 -> damaged + 1 : 0);
            next.until[1] = (next.live == 1 && need(next) > 1 -> damaged + 1 : 0); land(255); saw(16)
        :: else -> saw(17) fi;  /* another process wrote a record meanwhile: RefusedError */
        evidence = 0 } }
inline any(into, most) { into = 0; do :: into < most -> into++ :: break od }
inline any_group(g, sets) { any(slot[5].start[g], ABSENT); if :: slot[5].start[g] < ABSENT -> any(slot[5].kept[g], sets) :: else fi }
inline print_record(r) { printf(" %d %d %d %d %d %d %d", r.live, r.start[0], r.kept[0], r.start[1], r.kept[1], r.until[0], r.until[1]) }
proctype table() {              /* on a record 5 */
    byte op, what;
    atomic {
        any(slot[5].live, 2); any_group(0, 7); any_group(1, 2); if :: need(slot[5]) < slot[5].live -> goto ended :: else fi;
        if :: need(slot[5]) > 0 && slot[5].live == 0 -> any(slot[5].until[0], 2) :: else fi;
        if :: need(slot[5]) > 1 && slot[5].live < 2 -> slot[5].until[1] = 4 :: true fi;
        op = REGISTER; do :: op < ADVANCE -> op++ :: break od;
        if :: takes -> any(what, 7) :: op == ADVANCE -> any(what, 3) :: else fi;
        if :: takes && op != REPLACE && op != REVISE && what != 1 && what != 2 && what != 4 -> goto ended :: else fi;
        decide(5, 0, op, what); printf("row %d %d %d", op, fences(op), what); print_record(slot[5]); printf(" -> %d", verdict);
        if :: verdict != REFUSED -> print_record(next) :: else fi; printf("\n");
ended:  skip } }
init { atomic {
        c_code {
            now.mutant = bound("MUTANT", 0); now.witness = bound("WITNESS", 0); now.only = bound("PROPERTY", 0);
            now.processes = bound("PROCESSES", 7);      /* which processes run, as bits; then writer 1's group */
            now.home = bound("HOME_OF_1", 0); now.calls = bound("CALLS", 255); now.rounds = bound("ROUNDS", 1);
            now.operations[0] = bound("OPERATIONS_OF_0", 1); now.operations[1] = bound("OPERATIONS_OF_1", 1);
            now.faults = bound("FAULTS", 1); };
        promised_start[0] = ABSENT; promised_start[1] = ABSENT; slot[1].start[0] = ABSENT; slot[1].kept[1] = 4; promised[1] = 4;
        if :: true :: slot[1].start[0] = 0; promised_start[0] = 0 :: slot[1].start[0] = 0; slot[1].kept[0] = 3; promised[0] = 3 fi;
        if :: processes & 1 -> run writer(0, 0) :: else fi; if :: processes & 2 -> run writer(1, home) :: else fi;
        if :: processes & 4 -> run reclaimer(2) :: else fi; if :: processes & 8 -> run reclaimer(3) :: else fi;
        if :: processes & 16 -> run repair() :: else fi; if :: processes & 32 -> run table() :: else -> run network() fi } }

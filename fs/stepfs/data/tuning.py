"""The numbers of the data rooms that were tuned by measuring: change one, and run `bench_read` and `bench_train`."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shares are of a budget, times are in seconds; each has its reason beside it."""

    connections_min: int = 4  # at first, and never fewer: GETs on a shared link end together
    round_samples_min: int = 8  # GETs in a round, whose mean is compared with that of the round before
    round_loaded_share: float = 0.7  # of the limit under way during a GET: else its latency is not used
    limit_up: float = 1.5  # after a worse step down
    limit_down: float = 0.75  # after a worse step up
    limit_gain_share: float = 0.5  # of the growth promised must come: else more GETs only wait for each other
    limit_loss_max: float = 0.05  # of throughput, for which a step down is kept
    limit_hold_rounds: int = 8  # without a trial, after one that was undone
    limit_awaited_share: float = 0.25  # of the blocks of a round: below it no reader is waiting
    hedge_samples: int = 128  # latencies remembered by size, for their p99
    hedge_samples_min: int = 16  # below, nothing is known yet
    hedge_unknown_s: float = 5.0  # the delay until then
    hedge_min_s: float = 0.1  # the least delay of a second request, however fast the store
    hedge_max_s: float = 15.0  # the greatest, however slow
    hedge_margin: float = 1.5  # on the p99: the usual worst latency alone is no reason for a second request
    hedge_share_max: float = 0.01  # hedges per request in the long run: as many as the p99 implies
    hedge_burst: float = 3.0  # hedges before any credit is earned
    throttle_first_s: float = 0.1  # between requests after a first failure
    throttle_max_s: float = 5.0  # between them at most: a store that is back is noticed so soon
    failed_rest_s: float = 10.0  # a block that failed is fetched ahead again after so long; a reader never waits for it
    in_order_first: int = 4  # blocks of one open slice at a time, at first
    in_order_growth: float = 1.5  # so GETs on a full link take no longer than a second one waits
    silence_s: float = 2.0  # without a byte from a nearer place, or the cache disk: then the lake's store is asked
    answer_most_s: float = 10.0  # for one request there, however steadily its bytes come
    silent_rest_s: float = 5.0  # of one that answers nobody; doubled each time
    silent_rest_max_s: float = 60.0  # one that is back is noticed so soon
    late_max: int = 2  # requests that one of them still owes: each keeps a thread and a buffer beside the budget
    near_absent_s: float = 10.0  # that a block which nobody opened waits for who copies it: reading ahead is faster
    near_in_vain_max: int = (
        3  # waits that a reader ended: nobody fills the place, or the reader is faster than who does
    )
    near_look_s: float = 0.25  # before the place is asked again for it; doubled each time
    memory_told_s: float = 10.0  # that a reader has waited for memory before the log says so
    memory_poll_s: float = 0.05  # memory that a reader or a thread still sees returns without a signal
    reach_shift_max: int = 8  # a reader in order may displace blocks up to 2 to this power ahead
    unsaved_share: float = 0.5  # of memory for blocks not on disk yet: beyond, fetching runs ahead of the disk
    awaited_share: float = 0.5  # of memory for readers behind, not taken by reading ahead
    open_steps_max: int = 16  # steps pinned because they were opened
    open_share: float = 0.25  # of memory for them; with the share that prefetching may take, this is all of it
    reading_s: float = 2.0  # a slice that was read so lately is still being read
    spared_max: int = 4  # slices found reading per call: an open must not cost more with more readers
    flushed_bytes_min: int = 1 << 20  # a flush per small file costs more than the pages it frees
    disk_queue_max: int = 4096  # slices; beyond, the disk is the slower one and the oldest are not worth it
    disk_rest_s: float = 60.0  # after an error of the disk
    pressure_poll_s: float = 1.0  # between two looks at the machine's memory
    pressure_calm_s: float = 30.0  # so that two such programs do not trade memory for ever
    pressure_shrink: float = 0.7  # at once, in large steps
    pressure_grow: float = 1.1  # slowly
    available_share_min: float = 0.05  # of the limit
    available_bytes_enough: int = 4 << 30  # on large machines 5 % is a lot
    stall_percent_max: float = 20.0  # of the time in which all tasks wait for memory
    primed_share: float = 0.5  # of memory for primed pages
    primed_awaited_share: float = 0.25  # of memory for pages that another reader will open
    primed_batch_files: int = 64  # small files primed by one call into a thread
    checked_sample: int = 8  # files of a step that are looked at: looking costs an open
    gather_s: float = 0.01  # ranks of a node open a step one after another: one plan for all
    settle_s: float = 0.05  # no new slice for so long: the slices of this node are known
    settle_max_s: float = 0.5  # and no plan waits longer
    planning_share: float = 0.05  # of the time of the loop that plans for thousands of files may take
    index_retry_s: float = 1.0  # for an index that could not be read
    index_rest_s: float = 300.0  # for a damaged one
    entries_at_once: int = 8  # GETs of lone index entries at a time
    entries_max: int = 64  # before looking where readers are by now
    jumps_unplanned: int = 8  # steps opened while readers jump, before it is asked again whether they do
    ahead_share: float = 0.75  # of memory and disk for reading ahead; the rest is for open files
    dense_fill: float = 0.6  # of the places of a run were opened: a shuffle window, not jumps
    dense_share: float = 0.5  # of the lake: a run as wide is no window
    trust_share: float = 0.75  # of the steps judged went on from an opened one
    chance_max: float = 0.4  # were they drawn at random, at most so many would
    horizon_s: float = 20.0  # a store that is slow for less is not noticed
    judged_steps: int = 16  # opened for the first time, by which it is judged whether readers go on in order
    pace_samples: int = 16  # opens of new steps that give the pace
    window_min: int = 4  # steps ahead before the pace is known
    window_max: int = 1024  # steps ahead at most
    planned_files_max: int = 8192  # in a plan: planning must not hold up the loop
    recent_steps: int = 256  # distinct steps remembered: a shuffle window up to this size is understood
    live_steps: int = 48  # a run not touched during so many other steps has no reader any more


TUNING: Final = Tuning()

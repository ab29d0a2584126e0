"""The daemon's CPU time for each GB that a trainer reads, primed: in the long run, with less memory than data.

A paced reader goes once through a lake. What counts is the middle: memory has been through the daemon's hands by
then, so buffers and pages are reused, as they are in weeks of training, and there are still steps to fetch ahead.
"""

from __future__ import annotations

import time

from bench.bed import Bed, body_of
from bench.machine import MIB, touch_memory
from bench.probe import plain
from bench.report import at_most

STEPS = 96
COUNTED = range(32, 72)
PACE_BYTES_PER_S = 200e6
_MEMORY_STEPS = 24


def cpu(bed: Bed) -> None:
    """One pass; its beginning teaches the mount what is read, and touches the memory."""
    size = bed.plan.file_bytes // 2
    url = bed.lake("cpu", 1, ([body_of(step, size)] for step in range(STEPS)))
    budget = max(64, _MEMORY_STEPS * size // MIB)
    touch_memory(4 * budget * MIB)
    with bed.mounted(url, "--memory", f"{budget}M") as mount:
        read, due = plain(), time.monotonic()
        for step in range(STEPS):
            if step == COUNTED[0]:
                before, data, used = mount.requests(), mount.data(), mount.cpu_s()
            if step == COUNTED[-1] + 1:
                break
            assert read(str(mount.path(step, 0))) == size
            due = max(due + size / PACE_BYTES_PER_S, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        used = mount.cpu_s() - used
        reads = mount.spent(before).get("read", 0)
        data = {name: count - data[name] for name, count in mount.data().items()}
    delivered = len(COUNTED) * size / 1e9
    bed.report.figures["cpu"] = {"CPU s": used, "GB": delivered, "reads": reads, "data": data}
    text = f"{data['primed_files']} files primed, {data['reprimed_files']} again, {reads} READs; "
    text += f"{data['bytes_fetched'] / 1e9:.2f} GB fetched"
    ours = f"{used / delivered:.2f} CPU-s"
    what = f"daemon CPU per GB, {delivered:.1f} GB through {budget} MiB of memory"
    bed.report.add(at_most(1.2, what, ours, text, used / delivered, "CPU-s"))

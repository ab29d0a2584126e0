"""One lake, two stores: a stream is trained from its replica, its own store is lost for good, and a fork goes on.

Two servers. One reader mounts the replica, one the lake itself with `--near` the replica. After the loss a corpus that grew
is planned on in a fork of the replica: it must have the very bytes of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import servers

from bench.machine import BIN, forget_variables, let_go
from quickstart.audit import END
from quickstart.programs import run, start, stop
from quickstart.story import BRIEF, Story
from spans_audit import joined, read_mount

# Of each of two files; the loss comes long before their end.
DOCUMENTS, BYTES = (250, 2000) if BRIEF else (600, 4000)
KILL_AT_STEP, STEPS_PER_SECOND = (12, 3) if BRIEF else (60, 10)

PLAN = """\
version: 1
output: {ext: .safetensors, mesh: "dp=2", sequence_length: 1024}
sources:
  text: {format: jsonl, files: corpus/, epochs: 1}
until: {exhausted: all, last: pad}
"""
MORE = "  more: {format: jsonl, files: grown.jsonl, epochs: 1}\n"

READER = """
import hashlib, json, sys
from pathlib import Path
from stepfs import StreamState
mount, saved = Path(sys.argv[1]), Path(sys.argv[2])
stream = StreamState.of_mount(str(mount))
while True:
    step = stream.next_step
    (mount / f".stepfs/wait/{step}").read_bytes()
    files = sorted((mount / f"step-{step:09d}").iterdir())
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    stream.next_step = step + 1
    line = json.dumps({"state": stream.state_dict(), "step": step, "digest": digest})
    with saved.open("a") as file:
        file.write(line + "\\n")
"""


def tell(story: Story, running: ExitStack) -> None:
    forget_variables("AWS_")
    home, place = (running.enter_context(servers.seaweedfs(story.directory / name)) for name in ("home", "place"))
    story.lake, copy, new = f"{home.home}/lake", f"{place.home}/copy", f"{place.home}/new"
    os.environ.update(home.environment() | profiles(story.directory, place))
    plan = write_plan(story.directory)
    story.producers = [produce(running, plan, story.lake)]
    story.until("the lake", lambda: is_lake(story.lake))
    replicate = start(running, ["stepfs", "replicate", story.lake, copy, "--every", "250ms", "--json"])
    story.say(
        f"a producer commits to [bold]{story.lake}[/bold], and stepfs replicate copies to {copy} on another server"
    )
    far, near = story.directory / "far", story.directory / "near"
    story.mount(running, far, "--group", "far", "--wait-for-lake", "120", lake=copy)
    story.mount(running, near, "--near", copy)
    readers = {
        mount: start(running, [sys.executable, "-c", READER, str(mount), f"{mount}.log"]) for mount in (far, near)
    }
    story.until(f"step {KILL_AT_STEP}", lambda: all(len(read(mount)) > KILL_AT_STEP for mount in readers))
    home.kill()
    story.producers.pop().kill()
    shutil.rmtree(story.directory / "home", ignore_errors=True)
    shown = json.loads((near / ".stepfs/status.json").read_text())["next_step"]
    story.say(f"[bold red]the lake's server is gone for good[/bold red], behind step {shown - 1}")
    replicate.kill()
    cut = int(json.loads(run("stepfs", "status", copy, "--json").stdout)["next_step"])
    story.until("all that was copied", lambda: all(len(read(mount)) >= cut for mount in readers))
    alive = [mount.name for mount, reader in readers.items() if reader.poll() is None]
    story.check("both readers read all that was copied", f"steps 0 to {cut - 1}: {', '.join(alive)}", len(alive) == 2)
    for reader in readers.values():
        stop(reader)
    story.unmount(far)
    let_go(near)  # a read of bytes that nobody has any more may hold it until its deadline
    same = [one["digest"] for one in read(far)[:cut]] == [one["digest"] for one in read(near)[:cut]]
    story.check("the replica and the lake showed the same bytes", f"{cut} steps", same)
    go_on(story, running, plan, copy, new, cut, read(far)[KILL_AT_STEP]["state"])
    lost = max(0, shown - cut)
    story.check(
        "lost were the steps that were not copied", f"{lost} steps, made again in the fork", lost < KILL_AT_STEP
    )


def go_on(story: Story, running: ExitStack, plan: Path, copy: str, new: str, cut: int, state: dict[str, Any]) -> None:
    """Fork the replica, plan on over a corpus that grew, resume the trainer; then compare with a run without a loss."""
    reference = (story.directory / "reference").as_uri()
    run("stepfs-produce", "run", str(plan), reference, "--workers", "1", "--limit-steps", str(cut))
    write_documents(story.directory / "grown.jsonl", "grown", DOCUMENTS // 3)
    plan.write_text(PLAN.replace("until:", MORE + "until:"))
    run("stepfs", "fork", copy, new)
    ended = [
        json.loads(run("stepfs-produce", "run", str(plan), lake, "--workers", "1", "--accept-changes", "--json").stdout)
        for lake in (new, reference)
    ]
    story.say(f"the fork at step {cut} has the plan's end, step {ended[0]['total']['steps'] - 1}")
    mount, other = story.directory / "resumed", story.directory / "compared"
    story.mount(running, mount, "--group", "far", lake=new)
    story.mount(running, other, lake=reference)
    steps = int(ended[0]["total"]["steps"])
    program = (
        "import json, sys; from stepfs import StreamState; stream = StreamState.of_mount(sys.argv[1]); "
        "stream.load_state_dict(json.loads(sys.argv[2])); print(stream.next_step)"
    )
    resumed = run(sys.executable, "-c", program, str(mount), json.dumps(state)).stdout.strip()
    story.check(
        "a checkpoint of the lost lake resumes in the fork", f"at step {resumed}", int(resumed) == KILL_AT_STEP + 1
    )
    equal = sum(contents(mount, step) == contents(other, step) for step in range(steps))
    story.check("the fork's bytes are those of a run without a loss", f"{equal} of {steps} steps", equal == steps > cut)
    faults, documents = audit(mount, story.directory)
    story.check("every document is there exactly once", f"{documents} documents", not faults)
    story.unmount(mount)
    story.unmount(other)


def profiles(directory: Path, place: servers.S3Server) -> dict[str, str]:
    """The second server is an AWS profile, whose name begins the URL."""
    words = place.environment()
    keys = {"aws_access_key_id": words["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": words["AWS_SECRET_ACCESS_KEY"]}
    lines = [
        f"{name} = {value}"
        for name, value in (keys | {"endpoint_url": place.endpoint_url, "region": "us-east-1"}).items()
    ]
    path = directory / "aws-config"
    sections = [f"[profile {place.home}/{name}]\n" + "\n".join(lines) for name in ("copy", "new")]
    path.write_text("\n".join(sections) + "\n")
    return {"AWS_CONFIG_FILE": str(path)}


def write_plan(directory: Path) -> Path:
    (directory / "corpus").mkdir()
    for name in "ab":
        write_documents(directory / f"corpus/{name}.jsonl", name, DOCUMENTS)
    (directory / "plan.yaml").write_text(PLAN)
    return directory / "plan.yaml"


def write_documents(path: Path, name: str, count: int) -> None:
    texts = (f"{name} {number} " + "x" * (number * 37 % BYTES) for number in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def produce(running: ExitStack, plan: Path, lake: str) -> subprocess.Popen[str]:
    pace = ["--workers", "1", "--steps-per-second", str(STEPS_PER_SECOND), "--json"]
    return start(running, ["stepfs-produce", "run", str(plan), lake, *pace])


def is_lake(url: str) -> bool:
    return subprocess.run([BIN / "stepfs", "status", url], check=False, capture_output=True).returncode == 0


def read(mount: Path) -> list[dict[str, Any]]:
    """What the reader of this mount has written so far."""
    log = Path(f"{mount}.log")
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def contents(mount: Path, step: int) -> list[bytes]:
    return [path.read_bytes() for path in sorted((mount / f"step-{step:09d}").iterdir())]


def audit(mount: Path, directory: Path) -> tuple[list[str], int]:
    """Documents of the plan that are not there exactly once, whole; and how many there are."""
    found, faults = [], []
    for (_, (source, file, offset)), pieces in read_mount(mount)[1].items():
        ids = joined(pieces)
        if ids is None or ids[-1:] != [END]:
            faults.append(f"{source}, file {file} at byte {offset}: tokens missing or twice")
        else:
            found.append(bytes(ids[:-1]).decode())
    paths = [*directory.glob("corpus/*"), directory / "grown.jsonl"]
    expected = [json.loads(line)["text"] for path in paths for line in path.read_text().splitlines()]
    if sorted(found) != sorted(expected):
        faults.append(f"{len(found)} documents, not the {len(expected)} of the corpus")
    return faults, len(found)

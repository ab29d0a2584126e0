"""What people get wrong, command by command: one line that names the next command, option or value; the right exit code."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from functools import partial
from pathlib import Path

import forked
import pytest
from lakes import SLICES, Ended, commit, produce, stepfs
from stubs3 import Answer, xml_error

PLAN = """\
version: 1
output: {{ext: .safetensors, mesh: dp=1, sequence_length: 64, micro_batches: 1}}
sources: {{a: {{format: text, files: {files}}}}}
mix: {{a: 1}}
until: {{steps: 2}}
"""

# command: exit code, what the line says. ~ is a directory; its lake has five steps of three slices.
MISTAKES = r"""
mount s3:/bucket/run ~/empty: 2 has no scheme; do you mean s3://bucket/run?
mount S3://bucket/run ~/empty: 2 do you mean s3://bucket/run?
mount gcs://bucket/run ~/empty: 2 do you mean gs://bucket/run?
mount ~/lake ~/empty: 2 do you mean file://~/lake?
mount ~/full/../lake ~/empty: 2 do you mean file://~/lake?
mount file://lake ~/empty: 2 write "file://$PWD/lake"
mount s3:///run ~/empty: 2 write s3://bucket/prefix
mount s3://My_Bucket/run ~/empty: 2 'My_Bucket' is not a bucket name; write s3://bucket/prefix
mount https://s3.example.com/bucket/run ~/empty: 2 write s3://bucket/run, and the server as --endpoint-url https://s3.example.com
mount file://~/full ~/empty: 3 create one with `stepfs init file://~/full
mount ~/empty file://~/lake: 2 write `stepfs mount file://~/lake ~/empty`
mount file://~/lake ~/file: 4 choose an empty directory to mount on
mount file://~/lake ~/full: 4 mounting would hide that, choose another
mount file://~/lake ~/nowhere: 3 create it with `mkdir -p ~/nowhere`
mount file://~/lake: 2 Missing argument 'DIR'; see `stepfs mount --help`
mount file://~/lake ~/empty --rank 0: 2 (Possible options: --ranks); see `stepfs mount --help`
mount file://~/lake ~/empty --ranks 0-7: 2 here are 3 ranks; name some of 0-2
mount file://~/lake ~/empty --ranks 3-1: 2 write ranks and ranges such as 0-7
mount file://~/lake ~/empty --world 0: 2 use a multiple of 3
mount file://~/lake ~/empty --mesh dp=2: 2 dp=1 and dp=3 would
mount file://~/lake ~/empty --mesh dp: 2 write it as pp=2,dp=4,tp=2
mount file://~/lake ~/empty --steps 9:3: 2 write A:B with A < B
mount file://~/sealed ~/empty --steps 0:9: 4 Mount at most --steps 0:1
mount file://~/lake ~/empty --memory '4 GiG': 2 write a number and K, M, G, T or P
mount file://~/lake ~/empty --memory 1M: 2 at least 64M, and a --cache-dir
mount file://~/lake ~/empty --wait -5: 2 write seconds, or numbers with d, h, m, s or ms
mount file://~/lake ~/empty --wait 5min: 2 write seconds, or numbers with d, h, m, s or ms
mount file://~/lake ~/empty --poll 0: 2 use at least 1ms
mount file://~/lake ~/empty --metrics-port 99999: 2 not in the range 1<=x<=65535; see `stepfs mount --help`
mount file://~/lake ~/empty --log-format xml: 2 log format 'xml': write text or json
mount file://~/lake ~/empty --checkpoint-dir ~: 2 needs --group
mount file://~/lake ~/empty --next-step N+1: 2 needs --checkpoint-dir
mount file://~/lake ~/empty --group g --checkpoint-dir ~ --next-step n+1: 2 such as N, N+1 or N*4
mont file://~/lake ~/empty: 2 Did you mean 'mount', 'unmount'?; see `stepfs --help`
unmount ~/empty: 3 `stepfs doctor` lists the mounts
unmount file://~/lake: 2 name the directory that it is mounted on
status ~/empty: 3 `stepfs mount LAKE ~/empty`, or name the lake's URL
ls ~/lake: 2 a lake is a URL, such as file://~/lake
ls file://~/nolake: 3 create one with `stepfs init file://~/nolake
show file://~/lake --step 99: 3 (steps 0 to 4 are)
show ~/nofile: 3 name one that exists, or the URL of a lake
checkpoint file://~/lake --group nope 3: 3 `--new-group` makes a new one
retire-group file://~/lake nope: 3 `stepfs status` shows all
checkpoint file://~/lake 3: 2 Missing option '--group' (env var: 'STEPFS_GROUP'); see
checkpoint file://~/lake --group known 77: 2 only 5 steps are committed; is the checkpoint from another lake
checkpoint file://~/lake --group known 4 --drop: 3 keeps no checkpoint with next step 4
reclaim ~/empty: 2 a lake is a URL, such as file://~/empty
reclaim file://~/lake --grace 1w: 2 write seconds, or numbers with d, h, m, s or ms
reclaim file://~/lake --every 0s: 2 use at least 0.1s, better 60s
reclaim file://~/lake --every 1ms: 2 use at least 0.1s, better 60s
reclaim file://~/lake --every 0: 2 use at least 0.1s, better 60s
retire-producer file://~/lake nobody: 3 `stepfs status` lists those
seal file://~/nolake: 3 create one with `stepfs init
init file://~/lake --slices 3: 4 is a lake already (3 slices, .safetensors); use it, or choose another prefix
init file://~/new: 2 give --slices N
init ftp://host/x --slices 1: 2 unknown scheme 'ftp'; write file:///directory, s3://bucket/prefix
init http://host:9000/b/x --slices 1: 2 write s3://b/x, and the server as --endpoint-url http://host:9000
init relative/dir --slices 1: 2 a lake is a URL, such as file:///
init s3://no/ --slices 1: 2 is not a bucket name; write s3://bucket/prefix
init s3://key:secret@bucket/x --slices 1: 2 credentials and options do not belong
init file:///tmp/x --slices 0: 2 --slices 0: use 1 to 16384
init file:///tmp/x --slices many: 2 is not a valid int; see `stepfs init --help`
init file:///tmp/x --data-ranks 4 --slices 4: 2 give --slices N
init file:///tmp/x --slices 4 --cp 2: 2 give --slices N
init file:///tmp/x --slices 16385: 2 --slices 16385: use 1 to 16384
init file:///tmp/x --data-ranks 64 --micro-batches 257: 2 at most 16384 files, not 16448
init file:///tmp/x --data-ranks -2 --cp -2: 2 use 1 or more of each
init file://~/new --slices 2 --ext npy: 2 use a dot and letters or digits, such as .safetensors
fork file://~/lake file://~/new --until 99: 2 --until 99: the parent has 5 steps
fork file://~/lake file://~/sealed: 4 choose another prefix
verify file://~/nolake: 3 create one with `stepfs init
help mounting on mars: 3 `stepfs help` lists them
produce run file://~/lake ~/plan.yaml: 2 write `stepfs-produce run ~/plan.yaml file://~/lake`
produce run ~/plan.yaml ~/empty: 2 do you mean file://~/empty?
produce run ~ file://~/new: 4 name a readable YAML file
produce run ~/none.yaml file://~/new: 3 name the YAML file of a plan
produce run ~/tabs.yaml file://~/new: 2 tabs.yaml:2:1: no YAML: found character '\t'
produce run ~/file file://~/new: 2 write keys and values, such as {output:
produce run ~/plan.yaml file://~/sealed: 4 the lake is sealed; no more steps can be produced into it
produce run ~/plan.yaml file://~/lake: 4 name another lake, or set output.mesh to one with dp = 3
produce run ~/plan.yaml file://~/new --memory 1M: 2 Give more with --memory
produce run ~/plan.yaml file://~/new --workers 4:2: 2 use N or MIN:MAX
produce run ~/plan.yaml file://~/new --engine dask: 2 use local or ray
produce run ~/plan.yaml file://~/new --ray-address 10.0.0.4:6379: 2 needs --engine ray
produce run ~/plan.yaml: 2 Missing argument 'LAKE'; see `stepfs-produce run --help`
produce check ~/none.yaml: 3 name the YAML file of a plan
produce check ~: 4 Is a directory; name a readable YAML file
produce check: 2 PLAN
produce simulate ~/plan.yaml --limit-steps 0: 2 is not in the range x>=1; see `stepfs-produce simulate --help`
produce text file://~/new --slices 2: 2 Missing option '--input' / '-i'; see
produce text file://~/new --input ~/file: 2 give --slices N to create it
produce text file://~/new --input ~/nowhere --slices 2: 3 name files that exist
produce text file://~/new --input ~/file --slices 2 --tokenizer-file ~/none.json: 3 name the tokenizer.json of the model
produce text file://~/new --input ~/file --slices 2 --shard 2/2: 2 the first of 2 is 0/2
produce find file://~/lake --source a --file x --record 0: 3 the lake has no source 'a'
produce lineage file://~/lake --step 77: 3 (steps 0 to 4 are)
produce lineage ~/full/../lake --step 3: 2 of a lake write file://~/lake
produce lineage ~/file: 2 name one, or the lake: LAKE --step N --rank R
produce replay file://~/lake --steps 3:1: 2 write A:B with A < B
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    here = tmp_path_factory.mktemp("people")
    for name, text in (("file", "x\n" * 99), ("tabs.yaml", "version: 1\n\toutput: {}\n"), ("full/a", "")):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    (here / "empty").mkdir()
    (here / "plan.yaml").write_text(PLAN.format(files=here / "file"))
    assert stepfs("init", f"file://{here}/lake", "--slices", SLICES).code == 0
    commit(f"file://{here}/lake", range(5))
    assert stepfs("checkpoint", f"file://{here}/lake", "--group", "known", "--new-group", 2).code == 0
    plan = (here / "plan.yaml", f"file://{here}/sealed", "--workers", 1, "--limit-steps", 1)
    assert produce("run", *plan).code == 0
    assert stepfs("seal", f"file://{here}/sealed").code == 0
    yield here
    assert not (here / "new").exists(), "a mistake made a lake"


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines(), ids=lambda row: re.split(r": \d ", row)[0])
def test_a_mistake_is_one_line_with_the_next_step(row, here):
    typed, code, says = re.fullmatch(r"(.*?): (\d) (.*)", row.replace("~", str(here))).groups()
    program, *rest = shlex.split(typed)
    if program == "mount":  # a session leaves the rest to the end of its process
        ended = forked.ran("stepfs", [program, *rest, "--foreground"])
        done = Ended(ended.args, ended.returncode, ended.stdout, ended.stderr)
    else:
        done = produce(*rest) if program == "produce" else stepfs(program, *rest)
    assert (done.code, done.out, done.err.count("\n")) == (int(code), "", 1), done.err
    assert done.err.startswith("stepfs-produce: " if program == "produce" else "stepfs: ")
    assert says in done.err
    assert "unexpected" not in done.err
    assert "secret" not in done.err


@pytest.mark.parametrize("code", ["PermanentRedirect", "AuthorizationHeaderMalformed"])
def test_a_bucket_in_another_region_is_said_so(code, stub):
    there = xml_error(301 if code == "PermanentRedirect" else 400, code)
    stub.answer = lambda _method, _path: Answer(there.status, there.body, {"x-amz-bucket-region": "eu-west-9"})
    done = stepfs("ls", "s3://bucket/run", "--endpoint-url", stub.endpoint_url)
    assert (done.code, done.out, done.err.count("\n")) == (4, "", 1), done.err
    assert "the bucket is in another region" in done.err
    assert "set AWS_REGION to it" in done.err


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_server_that_sends_its_clients_elsewhere_is_named(status, stub):
    """An http:// URL, as a rule, of a server that wants https://."""
    stub.answer = lambda _method, _path: Answer(status, b"<html>moved</html>", {"Location": "https://store.example/"})
    done = stepfs("ls", "s3://bucket/run", "--endpoint-url", stub.endpoint_url)
    assert (done.code, done.out, done.err.count("\n")) == (4, "", 1), done.err
    assert "the server sends its clients elsewhere" in done.err
    assert "perhaps with https://" in done.err


def test_who_may_only_read_a_lake_cannot_reclaim_it():
    with tempfile.TemporaryDirectory() as place:  # not below pytest's, where nobody else may look
        directory, url = Path(place), f"file://{place}/lake"
        directory.chmod(0o755)
        assert stepfs("init", url, "--slices", SLICES).code == 0
        commit(url, range(5))
        assert stepfs("checkpoint", url, "--group", "known", "--new-group", 2).code == 0
        before = sorted(directory.rglob("*"))
        ended = forked.ran("stepfs", ["reclaim", url], first=partial(os.setuid, 65534))
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (4, "", 1), ended.stderr
        assert "permission denied; check owner, mode and mount" in ended.stderr
        assert sorted(directory.rglob("*")) == before

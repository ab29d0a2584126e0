"""What stands where on the site: a stranger's way in, tasks, operation, reference, the inside.

A new section of README, GUIDE or OPERATIONS becomes a page by itself, at the end of its tab; name it here to have it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from site_pages import reference
from site_pages.pages import Group, Page

_README, _GUIDE, _OPERATIONS, _SEMANTICS = "README.md", "fs/GUIDE.md", "fs/OPERATIONS.md", "fs/SEMANTICS.md"


def menu() -> list[Group]:
    """The tabs."""
    return [_start(), _tasks(), _operate(), _reference(), _inside(), _about()]


def _start() -> Group:
    return Group(
        "Start",
        (
            Page("index", "What it is", (f"{_README}#", f"{_README}#for-whom", f"{_README}#how-it-works")),
            *_cut(_README, "start", ("Install", "install")),
            Page("start/your-bucket", "Your bucket, corpus, loop", (f"{_README}#your-bucket-your-corpus-your-loop",)),
            *_cut(_README, "start", ("Produce", "produce")),
            Page("start/plan", "Plan", (f"{_README}#plan-many-sources-one-balanced-step",)),
            *_cut(_README, "start", ("Read", "read"), ("Limits", "limits"), ("Measured", "measured")),
        ),
    )


def _tasks() -> Group:
    return Group(
        "Tasks",
        (
            Page("tasks/index", "Guide: before you begin", (f"{_GUIDE}#", f"{_GUIDE}#before-you-begin")),
            Group(
                "Train",
                (
                    *_cut(
                        _GUIDE,
                        "tasks",
                        ("PyTorch", "train-with-pytorch"),
                        ("Hugging Face", "train-with-hugging-face"),
                        ("DDP, and resume after a kill", "ddp-and-resume-after-a-kill"),
                        ("Fewer GPUs than before", "the-job-came-back-with-fewer-gpus"),
                        ("WebDataset", "webdataset"),
                        ("Your trainer, and how it resumes", "your-trainer-and-how-it-resumes"),
                        ("Frameworks that deal out data", "frameworks-that-deal-out-data"),
                        ("Where FUSE is forbidden", "where-fuse-is-forbidden"),
                        ("Rollouts of asynchronous RL", "rollouts-of-asynchronous-rl"),
                        ("Arrays of another model", "arrays-of-another-model-beside-the-batch"),
                    ),
                ),
            ),
            Group(
                "Produce",
                (
                    *_cut(
                        _GUIDE,
                        "tasks",
                        ("From your own pipeline", "produce-from-your-own-pipeline"),
                        ("From a plan", "produce-from-a-plan"),
                        ("A validation lake", "a-validation-lake-with-a-loss-of-each-source"),
                        ("Supervised fine-tuning", "supervised-fine-tuning"),
                        ("A data set of Hugging Face", "from-a-data-set-of-hugging-face"),
                        ("Images and captions", "images-and-captions"),
                        ("More than one machine", "more-than-one-machine"),
                    ),
                ),
            ),
            Group(
                "Look, and correct",
                (
                    *_cut(
                        _GUIDE,
                        "tasks",
                        ("What the model reads", "what-the-model-reads"),
                        ("A report", "a-report-to-look-at"),
                        ("Look inside", "look-inside"),
                        ("Why the GPU waited", "why-the-gpu-waited"),
                        ("A loss spike at step N", "a-loss-spike-at-step-n"),
                        ("An author asks to be left out", "an-author-asks-to-be-left-out"),
                        ("One lake, two stores", "one-lake-two-stores"),
                        ("Clean up", "clean-up"),
                        ("Put it on machines", "put-it-on-machines"),
                    ),
                ),
            ),
        ),
        rest=_GUIDE,
    )


def _operate() -> Group:
    return Group(
        "Operate",
        (
            Page("operate/index", "Operations: settings", (f"{_OPERATIONS}#",)),
            *_cut(
                _OPERATIONS,
                "operate",
                ("Stores", "stores"),
                ("Producers", "producers"),
                ("Mounts", "mounts"),
                ("Groups and checkpoints", "groups-and-checkpoints"),
                ("Replicas", "replicas"),
                ("Repair", "repair"),
                ("Deploy", "deploy"),
                ("Volumes of Kubernetes", "volumes-of-kubernetes"),
                ("Credentials on a cluster", "credentials-on-a-cluster"),
            ),
            Page("operate/policies", "Least privilege", ("scripts/deploy/policies/README.md",)),
            Page(
                "operate/upgrade",
                "Upgrade, versions, removal",
                (f"{_OPERATIONS}#upgrade-and-removal", f"{_SEMANTICS}#versions"),
            ),
            *_cut(_OPERATIONS, "operate", ("Logs and diagnosis", "logs-and-diagnosis")),
            Page("operate/troubleshooting", "Troubleshooting by message", generated=reference.messages),
        ),
        rest=_OPERATIONS,
    )


def _reference() -> Group:
    return Group(
        "Reference",
        (
            *(
                Page(f"reference/{name}", f"Commands: {name}", generated=partial(reference.commands, name))
                for name in ("stepfs", "stepfs-produce")
            ),
            Page("reference/variables", "Variables", generated=reference.variables),
            Page("reference/plan-keys", "Plan keys", generated=reference.plan_keys),
            Page("reference/python", "Python", generated=reference.python),
            Page("reference/documents", "JSON documents", ("fs/JSON.md",), reference.documents),
            Page("reference/metrics", "Metrics and alerts", generated=reference.metrics_page),
            Page("reference/csi-attributes", "CSI attributes", generated=reference.csi_attributes),
            Page("reference/payloads", "Arrays in files", ("producer/PAYLOADS.md",)),
            Page("reference/promises", "Promises", (_SEMANTICS,)),
            Page(
                "reference/exit-codes",
                "Exit codes and errors",
                (f"{_OPERATIONS}#commands-and-exit-codes",),
                reference.exit_codes,
            ),
        ),
    )


def _inside() -> Group:
    return Group(
        "Inside",
        (
            Page("inside/architecture", "Map of the code", ("fs/ARCHITECTURE.md",)),
            Page("inside/format", "Stored objects", ("fs/FORMAT.md",)),
            Page("inside/commit", "Commit protocol", ("producer/COMMIT.md",)),
            Page("inside/planning", "Planning", ("producer/PLANNING.md",)),
            Page("inside/decisions-reading", "Decisions: reading", ("fs/DESIGN.md",)),
            Page("inside/decisions-producing", "Decisions: producing", ("producer/DESIGN.md",)),
            Page("inside/performance", "Performance", ("fs/PERFORMANCE.md",)),
        ),
    )


def _about() -> Group:
    return Group(
        "About",
        (
            Page("about/changelog", "Changelog", ("CHANGELOG.md",)),
            Page("about/security", "Security", (".github/SECURITY.md",)),
            Page("about/contributing", "Contributing", (".github/CONTRIBUTING.md", f"{_README}#develop")),
            Page("about/releasing", "Releasing", (".github/RELEASING.md",)),
        ),
        rest=_README,
    )


def _cut(file: str, folder: str, *sections: tuple[str, str]) -> Iterator[Page]:
    """Pages of one section each: (name in the menu, anchor)."""
    for name, anchor in sections:
        yield Page(f"{folder}/{anchor}", name, (f"{file}#{anchor}",))

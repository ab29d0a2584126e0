"""Pages that are made of the code: commands, variables, plan keys, Python, JSON documents, metrics, CSI attributes, errors,
and each message. Whoever adds an option, a field or a message changes none of this.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
import yaml

from api_page import page as api_page
from face import FACE
from site_pages.messages import ROOT, Message, collected
from site_pages.prose import code, escaped, for_mkdocs, slug, table
from stepfs import errors
from stepfs.cli.app import app
from stepfs.csi.node import OPTIONS
from stepfs.data.counters import HELP, METRICS
from stepfs.mount import metrics
from stepfs.mount.options import MountOptions
from stepfs_producer.cli.app import app as produce
from stepfs_producer.plan.file.schema import json_schema
from stepfs_producer.plan.values import PlanError
from stepfs_producer.run import metrics as run_metrics

_PROGRAMS: Final = {"stepfs": app, "stepfs-produce": produce}
_SETTINGS: Final = {  # variables of no option; a test finds a new one
    "STEPFS_DEBUG": "`1`: all messages of the log, and the traceback of an error.",
    "STEPFS_DIR": "Of `stepfs@.service`: the mount point.",
    "STEPFS_LAKE": "Of `stepfs@.service`: the lake.",
    "STEPFS_LOG_DIR": "The directory for the logs of mounts (default: `/var/log/stepfs`, `~/.local/state/stepfs`).",
    "STEPFS_SSE": "Server-side encryption of `s3://`: `AES256`, `aws:kms` or `aws:kms:dsse`.",
    "STEPFS_SSE_KMS_KEY_ID": "The key of `aws:kms`.",
}
_COMMANDS_MAX: Final = 6  # that are named
_ENDS: Final = {  # what a kind of metric puts behind its name
    "CounterMetricFamily": "_total", "GaugeMetricFamily": "", "InfoMetricFamily": "_info", "_family": "_bucket",
}  # fmt: skip
_ERRNOS: Final = (  # what a program that reads files sees, and the rule that promises it
    (
        "EIO",
        "The slice is damaged or gone in the store, or a later version is needed. The daemon's log names the object.",
        6,
    ),
    ("ETIMEDOUT", "The store, or the commit, did not come within 300 s. `stepfs status DIR` says which.", 8),
    ("ENOENT", "The step is not committed yet, reclaimed, or outside `--steps`; or `--wait` expired.", 15),
    ("ENOTCONN", "The mount's daemon is gone and nobody follows: `stepfs mount LAKE DIR` clears it.", 26),
    ("EACCES", "The mount point is closed after a signal (mount again), or is another user's mount.", 25),
    ("EROFS", "A mount is read-only.", 0),
    ("EAGAIN", "One user has too many waits open.", 21),
    ("ESTALE", "Over NFS: the step has left the view.", 11),
    ("SIGBUS", "A mapped page could not be fetched: the store or the daemon is away.", 9),
)


def commands(program: str) -> str:
    """Every command of a program: arguments, options, defaults, variables."""
    group: Any = typer.main.get_command(_PROGRAMS[program])
    context = typer.Context(group, info_name=program)
    parts = [f"# Commands: `{program}` {{ #{program} }}\n", f"{escaped(group.help or '')}\n"]
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        inner = typer.Context(command, info_name=name, parent=context)
        words = " ".join(one.make_metavar(inner) for one in command.params if one.param_type_name == "argument")
        options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        first, _, more = inspect.cleandoc(command.help or "").partition("\n\n")
        parts += [
            f"## {program} {name} {{ #{name} }}\n",
            f"{escaped(first)}\n",
            f"```sh\n{program} {name}{' [OPTIONS]' if options else ''} {words}".rstrip() + "\n```\n",
            *(f"{escaped(paragraph)}\n" for paragraph in more.split("\n\n") if paragraph),
        ]
        arguments = [one for one in command.params if one.param_type_name == "argument" and one.help]
        rows = [(code(one.make_metavar(inner)), escaped(one.help), "", "") for one in arguments]
        rows += [_option(one, inner) for one in options]
        parts.append(table(("option", "meaning", "default", "variable"), *rows) if rows else "")
    return "\n".join(parts)


def _option(one: Any, context: typer.Context) -> tuple[str, str, str, str]:
    names = " / ".join([*one.opts, *one.secondary_opts])
    metavar = "" if one.is_flag else f" {one.make_metavar(context)}"
    shown = "" if one.is_flag and not one.default else one.default
    default = "" if shown is None or callable(shown) else getattr(shown, "value", shown)
    default = "yes" if default is True else "no" if default is False else default
    return code(names + metavar), escaped(one.help or ""), code(default), code(one.envvar or "")


def variables() -> str:
    """Every variable `STEPFS_…`, and whose option it is."""
    options: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)
    for program, typed in _PROGRAMS.items():
        group: Any = typer.main.get_command(typed)
        context = typer.Context(group, info_name=program)
        for name in group.list_commands(context):
            for one in group.get_command(context, name).params:
                if one.envvar:
                    options[one.envvar].append((f"[`{program} {name}`]({program}.md#{name})", one))
    rows = [
        (code(name), escaped(found[0][1].help or ""), _places([place for place, _ in found]), code(found[0][1].opts[0]))
        for name, found in options.items()
    ]
    rows += [(code(name), escaped(said), "", "") for name, said in _SETTINGS.items()]
    return (
        "# Variables\n\nA variable gives an option a default; what is typed wins. An unknown `STEPFS_…` is a warning. "
        "Settings of the stores are those of AWS, Google and Azure: [Stores](../operate/stores.md).\n\n"
        + table(("variable", "meaning", "of", "option"), *sorted(rows))
    )


def _places(commands: list[str]) -> str:
    return ", ".join(commands) if len(commands) <= _COMMANDS_MAX else "most commands"


def plan_keys() -> str:
    """Every key of a plan file, part by part."""
    schema = json_schema()
    parts = [
        "# Plan keys\n",
        (
            "`stepfs-produce keys` prints this; `keys --json` is the JSON Schema, for editors. How a plan becomes steps: "
            "[Planning](../inside/planning.md). A program to copy from: [Plan](../start/plan.md).\n"
        ),
    ]
    for title, either in [("plan", schema), *schema["$defs"].items()]:
        part = either if "properties" in either else either["anyOf"][0]
        name = "The file" if title == "plan" else title
        parts += [f"## {name} {{ #{slug(title)} }}\n", f"{escaped(part.get('description', ''))}\n"]
        rows = [
            (code(key), escaped(_said(each, schema)), code(_value(each.get("default"))), _kind(each))
            for key, each in part["properties"].items()
        ]
        parts.append(table(("key", "meaning", "default", "value"), *rows))
    return "\n".join(parts)


def _said(key: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What a key means; what its part is, where the key says no more."""
    part = schema["$defs"].get(key.get("$ref", "").rpartition("/")[2], {})
    return str(key.get("description") or part.get("description", "").partition("\n\n")[0])


def _value(default: object) -> str:
    """A default that is not a part of its own, whose keys have defaults."""
    return "" if default is None or isinstance(default, dict) else json.dumps(default)


def _kind(schema: Mapping[str, Any]) -> str:
    """What a value may be, in words; a part leads to its keys."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{escaped(name)}](#{slug(name)})"
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return " ".join(code(each) for each in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return ", ".join(dict.fromkeys(filter(None, map(_kind, schema[key]))))
    if "items" in schema:
        return f"list of {_kind(schema['items']) or 'values'}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"by name: {_kind(schema['additionalProperties']) or 'values'}"
    kind = schema.get("type", "")
    return escaped(" or ".join(kind) if isinstance(kind, list) else kind)


def python() -> str:
    """The public names of both packages."""
    return "\n".join(for_mkdocs(api_page().replace("# API\n", "# Python\n", 1).split("\n")))


def documents() -> str:
    """The fields of each document."""
    parts = []
    for path in sorted(FACE.parent.glob("*.json")):
        if path != FACE:
            schema = json.loads(path.read_text())
            schema = _inlined(schema, schema.get("$defs", {}))
            parts += [f"\n## {escaped(schema.get('title', path.stem))} {{ #{slug(path.name)} }}\n"]
            parts.append(table(("field", "meaning", "value"), *_fields(schema, "")) if _fields(schema, "") else "")
    return "\n".join(parts)


def _inlined(part: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema with its definitions where they are named."""
    if isinstance(part, list):
        return [_inlined(one, definitions) for one in part]
    if isinstance(part, dict):
        named = definitions.get(str(part.get("$ref", "")).rpartition("/")[2], {})
        return {
            key: _inlined(one, definitions) for key, one in {**named, **part}.items() if key not in {"$ref", "$defs"}
        }
    return part


def _fields(schema: Mapping[str, Any], place: str) -> list[tuple[str, str, str]]:
    rows = []
    for name, field in (schema.get("properties") or {}).items():
        shown = f"{place}{name}" + ("" if name in schema.get("required", ()) else " (may be absent)")
        rows.append((code(shown), escaped(field.get("description", "")), _kind(field)))
        rows += _fields(field, f"{place}{name}.")
        for inner in field.get("anyOf", ()):
            rows += _fields(inner, f"{place}{name}.")
        for key, below in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(field.get(key), dict):
                rows += _fields(field[key], f"{place}{name}{below}.")
    return rows


def metric_names() -> list[tuple[str, str, str]]:
    """(name as it is scraped, what it says, labels) of each metric of both programs."""
    found = [(f"stepfs_{name}", said, "") for name, (said, _) in metrics.GAUGES.items()]
    found += [(f"stepfs_data_{METRICS[name]}_total", said, "") for name, said in HELP.items()]
    for module in (metrics, run_metrics):
        nodes = [*ast.walk(ast.parse(inspect.getsource(module)))]
        named = {ast.unparse(one.targets[0]): one.value for one in nodes if isinstance(one, ast.Assign)}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ENDS:
                name = ast.unparse(node.args[0]).replace("_PREFIX + ", "stepfs_produce_").replace("'", "")
                labels = [one.value for one in node.keywords if one.arg == "labels"] or node.args[2:3]
                if re.fullmatch(r"stepfs_\w+", name):  # others are those of the tables above
                    found.append(
                        (
                            name + _ENDS[node.func.id],
                            _words_of(named.get(ast.unparse(node.args[1]), node.args[1]))[0],
                            " ".join(_words_of(*labels)),
                        )
                    )
    return sorted(set(found))


def _words_of(*nodes: ast.AST) -> list[str]:
    """The texts that stand in expressions."""
    constants = [one.value for node in nodes for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return [one for one in constants if isinstance(one, str)]


def metrics_page() -> str:
    """Every metric, and every alert of scripts/deploy."""
    rows = [(code(name), escaped(said), " ".join(map(code, labels.split()))) for name, said, labels in metric_names()]
    rules = yaml.safe_load((ROOT / "scripts/deploy/prometheus-rules.yaml").read_text())
    alerts = [
        (code(rule["alert"]), code(rule["expr"]), escaped(_words(rule["annotations"])))
        for group in rules["groups"]
        for rule in group["rules"]
    ]
    return (
        "# Metrics and alerts\n\nA mount serves them with `--metrics-port`, and as `.stepfs/metrics`; `stepfs-produce run` "
        "with `--metrics-port`; on Kubernetes one scrape of `plugin` has all volumes of a node. `scripts/deploy` has the "
        "alerts, `prometheus-rules.yaml`, and a dashboard for Grafana.\n\n"
        "`process_…` are those of every Prometheus client. With each `…_bucket` come `…_sum` and `…_count`.\n\n## Metrics\n\n"
        + table(("metric", "meaning", "labels"), *rows)
        + "\n## Alerts\n\n"
        + table(("alert", "expression", "meaning, and what to do"), *alerts)
    )


def _words(annotations: Mapping[str, str]) -> str:
    summary = re.sub(r"\{\{ *\$labels\.(\w+) *\}\}", r"\1", annotations["summary"])
    return f"{summary[:1].upper()}{summary[1:]}. {re.sub(r'{{.*?}}', '…', annotations['description'])}"


def csi_attributes() -> str:
    """Attributes of a volume, from the options of a mount."""
    declared = MountOptions.__dataclass_fields__
    rows = [(code("lake"), "URL of the lake.", "required")]
    for attribute, (kind, option) in OPTIONS.items():
        default = str(declared[attribute.replace("-", "_")].default).lower() if kind is bool else option.given
        rows.append((code(attribute), escaped(option.help), code(default)))
    return (
        "# CSI attributes\n\n`volumeAttributes` of a PersistentVolume, as texts. What the driver is, its codes and "
        "secrets: [Volumes of Kubernetes](../operate/volumes-of-kubernetes.md).\n\n"
        + table(("attribute", "meaning", "default"), *rows)
    )


def exit_codes() -> str:
    """The class of each error, and what a reader of files sees."""
    kinds = [(name, kind) for name, kind in vars(errors).items() if _is_error(kind)]
    rows = [(code(name), str(kind.exit_code), escaped(inspect.getdoc(kind) or "")) for name, kind in kinds]
    numbers = [(code(name), escaped(said), f"{rule}" if rule else "") for name, said, rule in _ERRNOS]
    return (
        "## Errors in Python { #errors-in-python }\n\n"
        + table(("class of `stepfs.errors`", "exit code", "meaning, and what to do"), *rows)
        + "\n## Errors of files { #errors-of-files }\n\nWhat a program sees that reads a mount. "
        + "The rules are those of the [promises](promises.md).\n\n"
        + table(("errno", "meaning, and what to do", "rule"), *numbers)
    )


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.StepfsError)


def messages() -> str:
    """Every message, below what its kind means."""
    parts = [
        "# Troubleshooting by message\n",
        (
            "Search for words of the line that you see, without its names and numbers: here they are `…`. A command ends with "
            "the [exit code](../reference/exit-codes.md) that stands with the kind; what to do stands in the line, or with the "
            "kind. Where no line helps: `stepfs doctor DIR`, and the [logs](logs-and-diagnosis.md).\n"
        ),
    ]
    for kind, said, found in _kinds(collected()[0]):
        parts += [f"## {kind} {{ #{slug(kind)} }}\n", f"{said}\n"]
        parts += [f"#### {escaped(text)} {{ #{anchor} .message }}\n" for text, anchor in found]
    return "\n".join(parts)


def _kinds(found: list[Message]) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """(title, what it means, (text, anchor) of each message), by exit code."""
    told = {
        "doctor": (
            "Findings of the doctor",
            "`stepfs doctor` prints a subject before it, and the remedy behind the colon.",
        ),
        "record": (
            "Bad records",
            (
                "A record, or a stored file, that a plan cannot use. `on_error` of its source decides what happens: "
                "[plan keys](../reference/plan-keys.md#onerror)."
            ),
        ),
        "volume": (
            "Volumes of Kubernetes",
            "In the events of a pod: [codes](volumes-of-kubernetes.md). Lines of `stepfs mount` stand above.",
        ),
        PlanError.__name__: (
            "Mistakes of a plan (2)",
            (
                "Exit code 2. Before it stands the line of the file, and the key. All mistakes are told at once: "
                "[plan keys](../reference/plan-keys.md)."
            ),
        ),
    }
    for name, kind in vars(errors).items():
        if _is_error(kind):
            told[name] = (
                f"{name} ({kind.exit_code})",
                f"Exit code {kind.exit_code}. {escaped(inspect.getdoc(kind) or '')}",
            )
    seen: set[str] = set()
    for kind in sorted(told, key=lambda name: (name in {"doctor", "record", "volume"}, _code(name), name)):
        rows = []
        for message in found:
            if message.kind == kind:
                anchor, number = message.anchor, 1
                while anchor in seen:
                    number += 1
                    anchor = f"{message.anchor}-{number}"
                seen.add(anchor)
                rows.append((message.text, anchor))
        if rows:
            yield (*told[kind], rows)


def _code(name: str) -> int:
    return int(getattr(getattr(errors, name, PlanError), "exit_code", 0))

"""What stands beside a model's tokenizer.json: its chat templates, by name, and its special tokens.

Read as transformers 5 reads them: `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and
`additional_chat_templates/`, with the tokens that a class has where its configuration does not say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from stepfs.errors import AbsentError, UsageError
from stepfs_producer.plan.sources import Images, Tokenizer

_CONFIG: Final = "tokenizer_config.json"
_MAP: Final = "special_tokens_map.json"
_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
_AS_SAVED: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that take tokenizer.json as it is
_IMAGES_AS: Final = "Qwen2VLImageProcessor"  # of Qwen2-VL, 2.5 and 3
_END_OF_TEXT: Final = "<|endoftext|>"
_OF_CLASS: Final[Mapping[str, tuple[str | None, str]]] = {  # BOS and EOS
    "CodeLlamaTokenizer": ("<s>", "</s>"),
    "CohereTokenizer": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "GPT2Tokenizer": (_END_OF_TEXT, _END_OF_TEXT),
    "GPTNeoXTokenizer": (_END_OF_TEXT, _END_OF_TEXT),
    "GemmaTokenizer": ("<bos>", "<eos>"),
    "LlamaTokenizer": ("<s>", "</s>"),
    "Qwen2Tokenizer": (None, _END_OF_TEXT),
}


class Templates(NamedTuple):
    """Of a model."""

    default: str
    of_tools: str | None = None  # of records with tools, if that is another one


def templates_of(tokenizer: Tokenizer, below: Callable[[str], str]) -> Templates:
    """The chat templates: the one given, the one of the file that is named, or those beside the tokenizer's file."""
    given = tokenizer.chat_template
    if given is not None and "{" in given:
        return Templates(given)
    if tokenizer.file is None:
        raise UsageError("chats need a model's tokenizer; add tokenizer: {kind: huggingface, file: tokenizer.json}")
    if given is not None:
        return Templates(_content(Path(below(given))))
    folder = Path(tokenizer.file).parent
    found = {path.stem: _content(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (beside := folder / "chat_template.jinja").exists():
        found[_DEFAULT] = _content(beside)
    found = found or _named(_json(folder / _CONFIG).get("chat_template"))
    if _DEFAULT not in found:
        there = f", but {', '.join(sorted(found))}" if found else ""
        raise UsageError(
            f"no chat template beside {tokenizer.file} ({_CONFIG}, chat_template.jinja){there}; add chat_template: FILE to "
            "tokenizer"
        )
    return Templates(found[_DEFAULT], found.get(_TOOL_USE))


def _named(found: object) -> dict[str, str]:
    if isinstance(found, list):
        pairs = [(one.get("name"), one.get("template")) for one in found if isinstance(one, dict)]
        return {str(name): template for name, template in pairs if isinstance(template, str)}
    return {_DEFAULT: found} if isinstance(found, str) else {}


def special_tokens(tokenizer: Tokenizer) -> tuple[tuple[str, str | None], ...]:
    """What templates know as bos_token, eos_token and so on; None: the files say that there is none."""
    if tokenizer.file is None:
        return ()
    folder = Path(tokenizer.file).parent
    config = _json(folder / _CONFIG)
    if "added_tokens_decoder" not in config:
        config |= _json(folder / _MAP)
    extra = config.get("extra_special_tokens")
    config |= extra if isinstance(extra, dict) else {}
    found: dict[str, str | None] = {}
    for name, value in config.items():
        if name.endswith("_token") and not name.startswith("add_"):
            text = value.get("content") if isinstance(value, dict) else value
            if text is None or isinstance(text, str):
                found[name] = text
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    of_class = dict(zip(("bos_token", "eos_token"), _OF_CLASS.get(kind, ()), strict=False))
    return tuple(sorted({**of_class, **found}.items()))


def require_image_rule(tokenizer: Tokenizer, images: Images) -> None:
    """`UsageError` if the model's own processor would make other patches of a chat's images, or other tokens."""
    folder = Path(tokenizer.file or "").parent
    file = folder / "processor_config.json"
    if (found := _json(file).get("image_processor")) is None:
        file = folder / "preprocessor_config.json"
        found = _json(file)
    if not found:
        return
    kind = str(found.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
    if kind != _IMAGES_AS:
        raise UsageError(
            f"{file}: this model's images are prepared by {kind}, and those of chats as {_IMAGES_AS} does; make samples of "
            "both by a transform in place of chat"
        )
    patch, merge = found.get("patch_size", 14), found.get("merge_size", 2)
    least = found.get("min_pixels") or (found.get("size") or {}).get("shortest_edge") or 56 * 56
    theirs = {"patch": patch, "merge": merge, "patches_min": -(-least // patch**2)}
    if other := [f"{name}: {value}" for name, value in theirs.items() if getattr(images, name) != value]:
        raise UsageError(f"{file}: this model's images have other patches; write images: {{{', '.join(other)}}}")


def other_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> str | None:
    """How transformers' class for the model encodes these texts otherwise than its file, which it may build anew; None: it
    does not, or transformers is not installed.
    """
    folder = Path(tokenizer.file or "").parent
    kind = _json(folder / _CONFIG).get("tokenizer_class")
    if tokenizer.file is None or kind is None or kind in _AS_SAVED or find_spec("transformers") is None:
        return None
    from tokenizers import Tokenizer as Model  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415 - optional, and seconds

    own = Model.from_file(tokenizer.file)
    own.no_truncation()
    own.no_padding()
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        controls = list(theirs.all_special_tokens)[:1]
        looked_at = [control + text for text in texts for control in ("", *controls)]
        found = theirs(looked_at, add_special_tokens=False)["input_ids"]
    except Exception:  # noqa: BLE001 - a folder that transformers cannot load has no other ids
        return None
    others = sum(
        own.encode(text, add_special_tokens=False).ids != ids for text, ids in zip(looked_at, found, strict=True)
    )
    if not others:
        return None
    return (
        f"transformers gives other ids to {others} of {len(looked_at)} texts looked at, since {kind} builds the tokenizer anew; "
        f"to have its ids, save what it built: AutoTokenizer.from_pretrained({str(folder)!r}).backend_tokenizer.save("
        f"{tokenizer.file!r})"
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(_content(path))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); fetch it again") from error
    return found if isinstance(found, dict) else {}


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such chat template") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; name a readable chat template") from error

"""A model's tokenizer.json as it comes: the ids that the model was made for, whatever the file says about inference."""

import json
import os
import unicodedata
from contextlib import suppress
from pathlib import Path

import model_files
import pytest
from declared import tokenizer_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs_producer.transforms import tokenizer as model_tokenizer
from stepfs_producer.transforms.documents import UnfitRecordError
from stepfs_producer.transforms.tokenizer import load_tokenizer, open_tokenizer, pinned

KINDS = {"qwen": None, "gpt2": None, "llama": None, "bert": "[SEP]", "t5": None}
FILES = {name: getattr(model_files, name)() for name in [*KINDS, "words"]}


def of(name: str, **names: str | None) -> model_tokenizer.Tokenizer:
    names = {"eos": KINDS.get(name)} | names
    return open_tokenizer(tokenizer_spec(f"{name}.json", **names), FILES[name])


def by_library(name: str, text: str) -> list[int]:
    model = Tokenizer.from_str(FILES[name])
    model.no_truncation()
    model.no_padding()
    return model.encode(text, add_special_tokens=False).ids


def encoded(tokenizer: model_tokenizer.Tokenizer, texts: list[str]):
    closed = tokenizer.encode_plain(texts).closed(tokenizer.bos, tokenizer.eos)
    return closed.ids.values, closed.ids.lengths


def split(ids, lengths) -> list[list[int]]:
    left = iter(ids.tolist())
    return [[next(left) for _ in range(n)] for n in lengths.tolist()]


@pytest.mark.parametrize("name", KINDS)
@given(texts=st.lists(st.text("the cat<>/s日ï éÀ\n1,", max_size=40), max_size=5), cut=st.integers(0, 5))
@settings(max_examples=40)
def test_ids_are_the_models_own_and_no_text_shows_in_another(name: str, texts: list[str], cut: int) -> None:
    tokenizer = of(name)
    whole = split(*encoded(tokenizer, texts))
    parts = split(*encoded(tokenizer, texts[:cut])) + split(*encoded(tokenizer, texts[cut:]))
    assert whole == parts
    for text, ids in zip(texts, whole, strict=True):
        if not any(control in text for control in ("</s>", "<s>", "<pad>", "<unk>")):
            own = by_library(name, text)
            assert ids == ([*own, tokenizer.eos] if own else [])
        assert all(0 <= number < tokenizer.vocabulary for number in ids)
        assert tokenizer.eos not in ids[:-1]


@pytest.mark.parametrize(
    ("name", "control"),
    [("qwen", "<|endoftext|>"), ("qwen", "<|im_end|>"), ("gpt2", "<|endoftext|>"), ("llama", "</s>"), ("llama", "<s>"), ("llama", "<unk>"),
     ("bert", "[SEP]"), ("t5", "</s>"), ("t5", "<pad>")],
)  # fmt: skip
def test_a_control_token_that_a_text_spells_stays_text(name: str, control: str) -> None:
    tokenizer = of(name)
    number = Tokenizer.from_str(FILES[name]).token_to_id(control)
    ids, lengths = encoded(tokenizer, [f"a{control}b", control])
    first, second = split(ids, lengths)
    assert number not in first[:-1]
    assert number not in second[:-1]
    assert len(second) > 2
    assert number in by_library(name, f"a{control}b"), "the library alone would find it: the test can fail"


FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
WORDS = st.lists(st.sampled_from(["<|x|>", "the", " ", "1", "é", "\n", "a"]), max_size=8).map("".join)


@given(st.sampled_from(list(KINDS)), st.sets(st.sampled_from(FLAGS)), WORDS)
@settings(max_examples=300)
def test_a_control_token_is_found_as_its_file_says_and_its_inner_name_is_never_text(
    name: str, flags: set[str], text: str
) -> None:
    file = json.loads(FILES[name])
    number = Tokenizer.from_str(FILES[name]).get_vocab_size()
    token = dict.fromkeys(FLAGS, False) | dict.fromkeys(flags, True)
    file["added_tokens"].append({"id": number, "content": "<|x|>", "special": True} | token)
    theirs = Tokenizer.from_str(json.dumps(file))
    theirs.no_truncation()
    theirs.no_padding()
    expected = theirs.encode(text, add_special_tokens=False).ids
    tokens, plain = (
        open_tokenizer(tokenizer_spec("x.json", eos=KINDS[name], control_tokens=way), json.dumps(file))
        for way in ("tokens", "text")
    )
    assert tokens.encode_plain([text]).ids.values.tolist() == expected
    assert isinstance(plain, model_tokenizer.ModelTokenizer)
    own = plain.by_own_names
    written = text if own else text.replace("<|x|>", plain.control_tokens["<|x|>"])
    assert plain.encode_rendered(written, own=own).ids.tolist() == expected
    if own:  # beside a message that spells one
        with suppress(UnfitRecordError):
            ids = plain.encode_rendered(text.replace("<|x|>", plain.control_tokens["<|x|>"])).ids
            assert ids.tolist().count(number) == text.count("<|x|>")


def test_a_named_token_that_is_not_special_is_a_control_token_then() -> None:
    number = Tokenizer.from_str(FILES["qwen"]).token_to_id("<tool_call>")
    ids, _ = encoded(of("qwen"), ["a<tool_call>b"])
    assert number in ids.tolist(), "an added token that is not special is part of texts"
    named = of("qwen", eos="<tool_call>")
    ids, _ = encoded(named, ["a<tool_call>b"])
    assert ids.tolist().count(number) == 1
    assert ids[-1] == number == named.eos


def test_special_tokens_by_name_and_by_their_usual_names() -> None:
    names = Tokenizer.from_str(FILES["qwen"]).token_to_id
    usual = of("qwen")
    assert (usual.eos, usual.bos, usual.pad) == (names("<|endoftext|>"), None, names("<|endoftext|>"))
    assert usual.vocabulary == names("<tool_call>") + 1 == Tokenizer.from_str(FILES["qwen"]).get_vocab_size()
    named = of("qwen", eos="<|im_end|>", bos="<|im_start|>", pad="a")
    assert (named.eos, named.bos, named.pad) == (names("<|im_end|>"), names("<|im_start|>"), names("a"))
    ids, lengths = encoded(named, ["the", "", "cat"])
    assert split(ids, lengths) == [
        [named.bos, *by_library("qwen", text), named.eos] if text else [] for text in ("the", "", "cat")
    ]
    assert (of("t5").eos, of("t5").pad) == (1, 0)
    without = of("qwen", eos="none", pad="none", bos="none")
    assert (without.eos, without.bos, without.pad) == (None, None, 0)
    assert encoded(without, ["the"])[0].tolist() == by_library("qwen", "the")
    assert len({usual.identity, named.identity, without.identity, of("gpt2").identity}) == 4
    assert of("qwen", pad="a").identity == usual.identity, "padding is no part of a text's ids"


def test_an_end_that_is_not_clear_or_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"bert\.json does not say which token ends.*eos.*'\[SEP\]'"):
        of("bert", eos=None)
    both = json.loads(FILES["t5"])
    both["added_tokens"].append(both["added_tokens"][1] | {"id": 12, "content": "<|endoftext|>"})
    with pytest.raises(UsageError, match=r"'<\|endoftext\|>', '</s>'"):
        open_tokenizer(tokenizer_spec("t5.json"), json.dumps(both))
    with pytest.raises(UsageError, match=r"qwen\.json: the eos token '<\|endoftxt\|>'.*did you mean '<\|endoftext\|>'"):
        of("qwen", eos="<|endoftxt|>")
    with pytest.raises(UsageError, match=r"the pad token '日本語日本語' is not in its vocabulary$"):
        of("qwen", pad="日本語日本語")


def test_settings_of_inference_do_not_cut_fill_or_draw() -> None:
    tokenizer = of("qwen")
    ids, lengths = encoded(tokenizer, ["cat " * 30, "a"])
    assert lengths.tolist() == [len(by_library("qwen", "cat " * 30)) + 1, 2]
    random = model_files.edited(FILES["gpt2"], dropout=0.9)
    steady = open_tokenizer(tokenizer_spec("g.json"), random)
    ids, _ = encoded(steady, ["the cat sat on the mat " * 20])
    assert ids[:-1].tolist() == by_library("gpt2", "the cat sat on the mat " * 20)


def test_normalisers_do_what_the_model_expects() -> None:
    composed, _ = encoded(of("qwen"), [unicodedata.normalize("NFC", "naïve")])
    apart, _ = encoded(of("qwen"), [unicodedata.normalize("NFD", "naïve")])
    assert composed.tolist() == apart.tolist()
    upper, _ = encoded(of("bert"), ["THE CAT"])
    assert upper.tolist() == encoded(of("bert"), ["the cat"])[0].tolist()


def test_bytes() -> None:
    plain = open_tokenizer(tokenizer_spec())
    assert (plain.vocabulary, plain.eos, plain.bos, plain.pad) == (258, 256, None, 257)
    assert split(*encoded(plain, ["é", "", "a"])) == [[0xC3, 0xA9, 256], [], [97, 256]]
    assert encoded(open_tokenizer(tokenizer_spec(eos="none")), ["a"])[0].tolist() == [97]
    with pytest.raises(UsageError, match="kind bytes has no token '</s>'"):
        open_tokenizer(tokenizer_spec(eos="</s>"))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "{", '{"model": {}}', '{"model": 3}', '{"model": {"type": "BPE", "vocab": 3, "merges": []}}',
     FILES["qwen"][: len(FILES["qwen"]) // 2], FILES["qwen"].replace('"id":', '"ip":'), FILES["t5"].replace('"unk_id":2', '"unk_id":99'),
     FILES["llama"].replace('"special":', '"spexial":'), "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"^some/tokenizer\.json"):
        open_tokenizer(tokenizer_spec("some/tokenizer.json", eos="none"), text)


def test_a_file_is_read_once_and_a_changed_one_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(AbsentError, match=r"tokenizer\.json: no such tokenizer file"):
        load_tokenizer(tokenizer_spec(str(path)))
    path.write_text(FILES["gpt2"])
    loose = tokenizer_spec(str(path))
    kept = pinned(tokenizer_spec(str(path), pad="none"))  # not loaded yet
    before = load_tokenizer(loose)
    assert load_tokenizer(loose) is before
    path.write_text(FILES["qwen"])
    os.utime(path, ns=(1, 1))
    assert load_tokenizer(loose).identity != before.identity
    with pytest.raises(RefusedError, match=r"tokenizer\.json changed"):
        load_tokenizer(kept)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"tokenizer\.json: .*UTF-8"):
        load_tokenizer(loose)
    with pytest.raises(UsageError, match=r"could not be read"):
        load_tokenizer(tokenizer_spec(str(tmp_path)))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_tokenizer, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"kind huggingface.*pip install 'stepfs\[produce\]'"):
        of("qwen")


def test_a_control_token_in_a_text_is_text_or_the_token() -> None:
    text = "a<|im_end|>b"
    assert of("qwen").encode_plain([text]).ids.values.tolist() != by_library("qwen", text)
    tokens = open_tokenizer(tokenizer_spec("qwen.json", control_tokens="tokens"), FILES["qwen"])
    assert isinstance(tokens, model_tokenizer.ModelTokenizer)
    assert tokens.encode_plain([text]).ids.values.tolist() == by_library("qwen", text)
    assert tokens.spelled(text) == "<|im_end|>"
    assert tokens.spelled("a<|im_end") is None


def test_it_says_which_tokens_end_a_document_and_what_its_file_would_add() -> None:
    assert of("qwen").ends == "eos <|endoftext|>, bos none, padding <|endoftext|>"
    assert of("llama", eos="</s>").ends == (
        "eos </s> (of the plan), bos none, padding </s>; the file's own template adds <s>: name it as bos or eos if the "
        "model wants it"
    )
    assert of("llama", eos="none", bos="<s>").ends == "eos none, bos <s> (of the plan), padding <unk>"
    assert open_tokenizer(tokenizer_spec()).ends == "ids are bytes of UTF-8; eos 256, bos none, padding 257"

"""Small tokenizer.json files of the kinds that models have, trained here, with the traps that such files hold."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the cat sat on the mat",
    "naïve 日本語 text, over and over",
    "def add(a, b):\n    return a + b\n",
] * 20
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def qwen() -> str:
    """Byte-level BPE, NFC, control tokens above the vocabulary, one of them not special; settings of inference."""
    model = Tokenizer(models.BPE())
    model.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model.decoder = decoders.ByteLevel()
    model.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=BYTES, show_progress=False))
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    model.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    model.enable_truncation(8)
    model.enable_padding(length=16, pad_id=0)
    return model.to_str()


def gpt2() -> str:
    """Byte-level BPE whose own vocabulary holds <|endoftext|>."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=BYTES, special_tokens=["<|endoftext|>"], show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    return model.to_str()


def llama() -> str:
    """SentencePiece's BPE: metaspace, byte fallback, a normaliser that prepends, merges that spell `</s>`, a template."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz<>/", "th", "the", "▁the", "</", "s>"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("<", "/"), ("s", ">"), ("</", "s>")]
    model = Tokenizer(
        models.BPE({p: n for n, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return model.to_str()


def bert() -> str:
    """WordPiece, lower case without accents."""
    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    model.train_from_iterator(CORPUS, trainer)
    model.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return model.to_str()


def t5() -> str:
    """Unigram, which finds `</s>` in its own vocabulary and prefers it to its characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁a", -1.0)]
    model = Tokenizer(models.Unigram([*pieces, *((c, -3.0) for c in "abcs</>")], 2, False))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return model.to_str()


def words() -> str:
    """A word each, and none for the unknown."""
    model = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "</s>": 2}))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["</s>"])
    return model.to_str()


def edited(model_json: str, **model: Any) -> str:
    """The file with other settings of its model."""
    data = json.loads(model_json)
    data["model"] |= model
    return json.dumps(data)

"""Functions that a user might name in a plan, for tests of transforms."""

import json

import numpy as np


def render(record):
    """Chat turns: what the assistant says is learned."""
    ids, mask = [], []
    for turn in record["turns"]:
        text = list(turn["text"].encode())
        ids += text
        mask += [int(turn["by"] == "assistant")] * len(text)
    return ids, mask


def anything(record):
    """What the record says that it returns, or raises."""
    if "raise" in record:
        raise {
            "ValueError": ValueError,
            "OSError": OSError,
            "MemoryError": MemoryError,
            "KeyError": KeyError,
            "PanicException": type("PanicException", (BaseException,), {}),  # as Rust's libraries raise it
        }[record["raise"]]("of no\nuse")
    value = record["value"]
    return {"tuple": tuple, "array": np.array, "floats": lambda v: np.array(v, float), "bytes": bytes}.get(
        record.get("as"), lambda v: v
    )(value)


def shuffled(record, *, key):
    """Augmentation: the bytes of a text in an order of the key's."""
    ids = np.frombuffer(record.encode(), np.uint8).copy()
    np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).shuffle(ids)
    return ids


def upper(text):
    return text.upper()


def crossed(record):
    """A text in capitals, of whatever a source gives; token ids as they are."""
    if not isinstance(record, (str, dict)) or "input_ids" in record:
        return record
    return (record if isinstance(record, str) else record["text"]).upper()


def crossed_with_rows(record):
    """The same, with rows of its own number."""
    found = crossed(record)
    made = {"text": found} if isinstance(found, str) else found if isinstance(found, dict) else {"input_ids": found}
    number = int(made["text"].split()[0]) if "text" in made else int(made["input_ids"][0])
    return {**made, "columns": {"numbers": np.full((number % 3, 2), number, np.uint8)}}


def half_a_character(_text):
    return "\ud800"


def halved(record):
    """Of tokens, with or without a mask."""
    if isinstance(record, dict):
        return {"input_ids": record["input_ids"][::2], "loss_mask": record["loss_mask"][::2]}
    return record[::2]


def overwrite(ids):
    ids[0] = 7
    return ids


def surprising_default(record, max_turns=3):
    return json.dumps([record, max_turns])


constant = 3


PIXELS = np.zeros((4, 6), np.uint8)


def pictured(record):
    """Tokens, and the columns that the record asks for: one array, written again and again."""
    columns = {}
    for name, (dtype, shape) in record.get("columns", {}).items():
        columns[name] = np.full(shape, record["value"], dtype)
    if "pixels" in record:
        PIXELS[:] = record["pixels"]
        columns["pixels"] = PIXELS[: record.get("rows", 4)]
    content = {"text": record["text"]} if "text" in record else {"input_ids": record.get("ids", [5, 7])}
    return {**content, "columns": record.get("raw", columns)}


def captioned(record):
    """A caption behind its image, as the example does it."""
    image = record["jpg"]
    return {
        "input_ids": [0] * (len(image.pixels) // 4) + list(record["txt"]),
        "columns": {"pixels": image.pixels, "grid": image.grid},
    }

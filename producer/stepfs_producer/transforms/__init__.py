"""Records → samples: `tokenizer` turns text into token ids, `images` makes patches, `user` calls a function of the user's."""

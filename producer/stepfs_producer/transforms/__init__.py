"""Records → samples: `tokenize`, `model_tokenizer` turn text into token ids; `images` makes patches,
`user` calls a function of the user's."""

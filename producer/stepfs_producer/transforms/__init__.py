"""Records → samples: `tokenize`, `model_tokenizer` turn text into token ids; `user` calls a function of the user's."""

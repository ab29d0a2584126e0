"""Records → samples: `tokenize` turns bytes into token ids and back."""

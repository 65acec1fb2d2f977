"""What each family's `config.json` says of a model: one reader, a `ModelShape`, no weights."""

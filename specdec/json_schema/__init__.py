"""Conversion of JSON schemas to grammars. Keywords that no grammar can follow are refused by name."""

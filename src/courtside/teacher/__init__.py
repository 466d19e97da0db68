"""The same tokens, scored by somebody who knows more."""

"""Where prompts come from, and the programs that grade answers. Knows no models and no tokens."""

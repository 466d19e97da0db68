"""A model as the reader: prompt, client, parsing of its answer."""

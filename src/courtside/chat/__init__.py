"""Messages to token ids with exact spans, and back never."""

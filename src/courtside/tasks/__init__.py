"""Task sources and graders. They know no models and no tokens."""

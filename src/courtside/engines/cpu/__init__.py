"""Process settings for a CPU: threads."""

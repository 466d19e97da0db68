"""Process settings for a CPU: threads and malloc."""

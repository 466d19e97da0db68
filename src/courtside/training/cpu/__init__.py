"""What makes an update cheaper on a CPU: gradient buffers, bf16 linear layers."""

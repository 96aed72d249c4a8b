"""What a trainer rank holds, for the layouts of FSDP2, tensor parallelism and Megatron."""

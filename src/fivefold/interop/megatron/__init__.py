"""Megatron-LM's command line, its YAML, and the overrides of Megatron-Bridge and NeMo."""

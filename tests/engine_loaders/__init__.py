"""What vLLM's and SGLang's own loaders make of what quantkit writes; README.md says how, and what it cannot show."""

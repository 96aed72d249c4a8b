"""How vLLM's workers load, post-process and hold weights; works with vLLM 0.26 and 0.32."""

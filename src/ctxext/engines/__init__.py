"""Inference engines (vLLM and llama.cpp), whose servers are started, and the plugin for relation maps in vLLM."""

"""Inference engines (vLLM and llama.cpp), and the plugin for relation maps in vLLM."""

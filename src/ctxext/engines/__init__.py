"""The start of the servers of vLLM and llama.cpp, and the plugin for relation maps in vLLM."""

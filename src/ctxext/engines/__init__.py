"""Programs that run models: vLLM and llama.cpp, and the plugin by which vLLM runs relation maps."""

"""kvlab: predict, measure and explain how an LLM server behaves."""

__version__ = "0.1.0"

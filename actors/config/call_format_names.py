"""Names of the formats of tool calls: values of `--tool-call-parser`, and other engines' names."""

from __future__ import annotations

CALL_FORMATS = (
    "harmony", "gemma4", "functiongemma", "deepseek_v41", "deepseek_v4", "deepseek_v32",
    "deepseek_v3", "deepseek_v31", "kimi_k2", "mistral", "minimax_m2", "seed_oss", "step3", "hy_v3",
    "iquest_q1", "glm45", "dots", "longcat", "apertus", "cohere_command3", "gigachat3", "lfm2",
    "olmo3", "llama4_pythonic", "internlm", "granite", "granite-20b-fc", "phi4_mini_json",
    "ernie45", "jamba", "qwen3_coder", "mimo", "hermes", "llama3_json", "xlam", "pythonic")
"""The rows of `gateway/parsers/call_formats.py`, in their order."""
TOOL_PARSERS = ("auto", "none", *CALL_FORMATS)
ALIASES = {
    "openai": "harmony", "gpt-oss": "harmony",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4", "deepseekv41": "deepseek_v41",
    "minimax-m2": "minimax_m2", "minimax": "jamba", "hunyuan_a13b": "jamba",
    "hunyuan": "hy_v3",
    "glm": "glm45", "glm47": "glm45", "ling3": "glm45", "poolside_v1": "glm45",
    "spark25": "glm45",
    "apertus2509": "apertus",
    "cohere_command4": "cohere_command3",
    "interns1": "internlm",
    "qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "qwen": "hermes", "qwen25": "hermes", "qwen3_json": "hermes", "granite4": "hermes",
    "trinity": "hermes",
    "llama3": "llama3_json", "llama4_json": "llama3_json"}
"""Other engines' names of the same formats."""

"""Chat templates of the kinds that public models have, written for these tests. ⟦ and ⟧ hold what an assistant's turn adds."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}⟦{{ m['content'] + '<|im_end|>\\n' }}⟧"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}{{- 'Functions:\\n' }}{% for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{% endfor %}{% endif %}
{{- system }}{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'assistant' %}⟦{% if 'tool_calls' in m %}{{- m.tool_calls[0].function | tojson }}{% else %}{{- m['content'] | trim }}{% endif %}{{- '<|eot_id|>' }}⟧
{%- else %}{{- m['content'] | trim + '<|eot_id|>' }}{%- endif %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if m['role'] == 'user' %}{{- '[INST] ' + m['content'] + ' [/INST]' }}
{%- else %}⟦{{- ' ' + m['content'] + eos_token }}⟧{% endif %}
{%- endfor %}"""
GEMMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\\n' }}
{%- if role == 'model' %}⟦{{- m['content'] | trim + '<end_of_turn>\\n' }}⟧{% else %}{{- m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
DEEPSEEK = """{% set ns = namespace(system='') %}
{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] + '<｜Assistant｜>' }}
{%- elif m['role'] == 'assistant' %}⟦{{- m['content'] + '<｜end▁of▁sentence｜>' }}⟧{% endif %}
{%- endfor %}"""
QWEN = """{%- if tools %}
{{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=messages|length - 1, seeking=true) %}
{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.seeking and m.role == 'user' and m.content is string %}{% set ns.seeking = false %}{% set ns.last = index %}{% endif %}{%- endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}⟦{%- if loop.index0 > ns.last and thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{- content }}
{%- if m.tool_calls %}{% for call in m.tool_calls %}{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}⟧
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
PHI = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}⟦{{ m['content'] + '<|end|>\\n' }}⟧"
    "{% else %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
COMMAND = """{{- bos_token }}
{%- for m in messages %}
{%- set who = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m['role']] %}
{{- '<|START_OF_TURN_TOKEN|><|' + who + '_TOKEN|>' }}
{%- if who == 'CHATBOT' %}⟦{{- m['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}⟧{% else %}{{- m['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
ZEPHYR = """{% for m in messages %}
{% if m['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}⟦{{ m['content'] + eos_token + '\\n' }}⟧{% else %}
{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
GPT_OSS = """{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|start|>assistant' }}⟦
{%- if m.thinking %}{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}
{{- '<|channel|>final<|message|>' + m.content + '<|end|>' }}⟧
{%- else %}{{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
GRANITE = """{%- for m in messages %}
{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' }}
{%- if m['role'] == 'assistant' %}⟦{{- m['content'] + '<|end_of_text|>\\n' }}⟧{% else %}{{- m['content'] + '<|end_of_text|>\\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
{%- endfor %}"""
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:⟦ {{ m.content }}\n\n⟧{% else %}"
    "{{ m.role | capitalize }}: {{ m.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "deepseek": DEEPSEEK, "qwen": QWEN, "phi": PHI,
    "command": COMMAND, "zephyr": ZEPHYR, "gpt-oss": GPT_OSS, "granite": GRANITE, "plain": PLAIN,
}  # fmt: skip
CONTROLS = [
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|start|>", "<|message|>", "<|channel|>", "<|start_of_role|>",
    "<|end_of_role|>", "<|end_of_text|>",
]  # fmt: skip


def with_blocks(name: str) -> str:
    """With `{% generation %}` around each turn of the assistant's."""
    return TEMPLATES[name].replace("⟦", "{% generation %}").replace("⟧", "{% endgeneration %}")


def without_blocks(name: str) -> str:
    return TEMPLATES[name].replace("⟦", "").replace("⟧", "")

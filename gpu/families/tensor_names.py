"""What checkpoints of some families call tensors that `causal_layer` names otherwise; names of ours
stay as they are."""

from __future__ import annotations

import re

Renames = tuple[tuple[str, str], ...]
"""(regular expression of a part of a name, what is put in its place), one after the other."""

WRAPPED = ("base_model.model.", "_orig_mod.", "module.", "language_model.")
"""What names begin with in checkpoints that were saved from within a wrapper: of adapters that are
merged (PEFT), of a compiled model, of a distributed one, of one of text and images."""
NESTED = (("model.language_model.", "model."), ("model.text_model.", "model."),
          ("model.visual.", "visual."),
          ("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."),
          ("norm.", "model.norm."), ("model.final_layernorm.", "model.norm."),
          ("model.embedding_norm.", "model.norm."), ("backbone.norm_f.", "model.norm."),
          ("backbone.embeddings.", "model.embed_tokens."), ("backbone.layers.", "model.layers."),
          ("model.norm_f.", "model.norm."), ("model.embeddings.", "model.embed_tokens."))
"""Where checkpoints of text and images have their language model, and what it is called alone; the
tower; what is called otherwise in those of a model without its head; and what some families call
all but their layers' parts."""
OF_TORCHAO = ((r"\._weight_qdata$", ".weight"), (r"\._weight_", ".weight_"))
"""What torchao calls the tensors of a weight, and others those that are the same."""

FEED: Renames = ((r"\.mlp\.(c_fc|fc1|fc_in|dense_h_to_4h)\.", ".mlp.up_proj."),
                 (r"\.mlp\.(c_proj|fc2|fc_out|dense_4h_to_h)\.", ".mlp.down_proj."))
"""The MLP of most of them."""
BY_HEAD: Renames = (
    (r"\.(attention|self_attention)\.query_key_value\.", ".self_attn.qkv_by_head."),
    (r"\.(attention|self_attention)\.dense\.", ".self_attn.o_proj."))
HEAD_NORMS: Renames = ((r"\.([qk])_layernorm\.", r".\1_norm."),)
PHI: Renames = (*FEED, *HEAD_NORMS, (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
                (r"^model\.final_layernorm\.", "model.norm."))
PERSIMMON: Renames = (
    *PHI, (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_by_head."))
NEOX: Renames = (
    *FEED, *BY_HEAD, (r"^(gpt_neox\.)?embed_in\.", "model.embed_tokens."),
    (r"^gpt_neox\.layers\.", "model.layers."), (r"^embed_out\.", "lm_head."),
    (r"^(gpt_neox\.)?final_layer_norm\.", "model.norm."))
GPT: Renames = (
    *FEED, (r"^(transformer\.)?(wte|word_embeddings)\.", "model.embed_tokens."),
    (r"^(transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(transformer\.)?ln_f\.", "model.norm."), (r"^(transformer\.)?h\.", "model.layers."),
    (r"\.(ln_1|ln_attn)\.", ".input_layernorm."),
    (r"\.(ln_2|ln_mlp)\.", ".post_attention_layernorm."),
    (r"\.attn\.([qkv]_proj)\.", r".self_attn.\1."),
    (r"\.attn\.(c_proj|out_proj)\.", ".self_attn.o_proj."))
GPT2: Renames = ((r"\.c_(attn|proj|fc)\.weight$", r".c_\1.weight_t"), *GPT,
                 (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."))
"""Its matrices lie on their side: [inputs, outputs]."""
BIGCODE: Renames = (*GPT, (r"\.attn\.c_attn\.", ".self_attn.qkv_by_head."))
FALCON: Renames = (*GPT, *BY_HEAD)
BLOOM: Renames = (
    (r"^(transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."), *FALCON)
MPT: Renames = (
    (r"^transformer\.blocks\.", "model.layers."), (r"\.norm_1\.", ".input_layernorm."),
    (r"\.norm_2\.", ".post_attention_layernorm."), (r"\.ffn\.", ".mlp."),
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."), (r"^transformer\.norm_f\.", "model.norm."), *GPT)
OPT: Renames = (
    (r"^(model\.)?decoder\.embed_positions\.weight$", "model.embed_positions.padded"),
    (r"^(model\.)?decoder\.final_layer_norm\.", "model.norm."),
    (r"^(model\.)?decoder\.", "model."), (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."), (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."))
ENCODER: Renames = (
    (r"\.gamma$", ".weight"), (r"\.beta$", ".bias"),
    (r"^((bert|roberta|distilbert|mpnet|nomic_bert|new|gte)\.)+", ""),
    (r"^embeddings\.(word|tok)_embeddings\.", "model.embed_tokens."),
    (r"^model\.embed_tokens\.tok_embeddings\.", "model.embed_tokens."),
    (r"^(embeddings|model\.embed_tokens)\.norm\.", "model.embed_norm."),
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "model.embed_norm."),
    (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "model.embed_token_types."),
    (r"^encoder\.relative_attention_bias\.", "model.distances."),
    (r"\.attention\.attn\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention\.LayerNorm\.", ".post_attention_layernorm."),
    (r"^((encoder|transformer)\.)?layers?\.", "model.layers."),
    (r"^(model\.)?final_norm\.", "model.norm."),
    (r"\.attention\.(self\.)?(?=(query|key|value|[qkv]_lin)\.)", ".self_attn."),
    (r"\.self_attn\.(q|k|v)(uery|ey|alue|_lin)\.", r".self_attn.\1_proj."),
    (r"\.(attn|attention)\.(Wqkv|qkv_proj)\.", ".self_attn.qkv_proj."),
    (r"\.(attn|attention)\.(output\.dense|out_lin|out_proj|Wo|o_proj)\.", ".self_attn.o_proj."),
    (r"\.(attention\.output\.LayerNorm|sa_layer_norm|norm1|attn_ln)\.",
     ".post_attention_layernorm."),
    (r"\.(output\.LayerNorm|output_layer_norm|norm2|mlp_ln)\.", ".post_mlp_layernorm."),
    (r"\.(intermediate\.dense|ffn\.lin1|mlp\.fc11)\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."), (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
    (r"\.(output\.dense|ffn\.lin2|mlp\.fc2|mlp\.Wo)\.", ".mlp.down_proj."),
    (r"^((pooler\.|classifier\.)?dense|pre_classifier)\.", "head.dense."),
    (r"^classifier\.(out_proj\.)?(?=(weight|bias)$)", "score."),
    (r"\.attn_norm\.", ".input_layernorm."), (r"\.mlp_norm\.", ".post_attention_layernorm."))
"""Of BERT and its kin, ModernBERT among them."""
ROBERTA: Renames = (
    *ENCODER, (r"^model\.embed_positions\.weight$", "model.embed_positions.padded"))
KIMI: Renames = ((r"\.block_sparse_moe\.", ".mlp."), (r"\.self_attn\.forget_gate\.", ".self_attn."))
"""Of Kimi Linear, which `parted_layer` names."""


def plain_name(name: str, renames: Renames) -> str:
    """The name that the tensor has in `model_tensors`, which are those of the language model alone.
    """
    for wrapper in WRAPPED:
        name = name.removeprefix(wrapper)
    for nested, plain in NESTED:
        if name.startswith(nested):
            name = plain + name[len(nested):]
    for part, own in (*renames, *OF_TORCHAO):
        name = re.sub(part, own, name)
    return name

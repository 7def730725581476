// ik_llama.cpp in plain numbers. Its structures grow from one commit to the next, and only the llama.h of the checkout
// knows their layout: ikllama.py compiles this against it, with MAX_ROWS defined as the rows of a call at most.
// Functions that can fail return NULL, or another number than 0; shim_likeliest returns -1.

#include "llama.h"

void * shim_load(const char * path, bool repack) {
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    params.use_mmap = !repack;  // what is laid out anew cannot stay in the file
    params.repack_tensors = repack;
    params.merge_qkv = repack;
    return llama_model_load_from_file(path, params);
}

void * shim_context(void * model, int num_tokens, int num_sequences, int threads, bool flash) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = num_tokens;
    params.n_seq_max = num_sequences;
    params.n_batch = params.n_ubatch = MAX_ROWS;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn = flash;
    return llama_init_from_model(model, params);
}

int shim_num_vocab(void * model) { return llama_n_vocab(model); }

int shim_decode(void * context, int count, int * tokens, int * positions, int * sequences, signed char * wanted) {
    static int32_t ones[MAX_ROWS];
    static llama_seq_id * sequence_of[MAX_ROWS];
    if (count > MAX_ROWS) {
        return -1;
    }
    for (int i = 0; i < count; i++) {
        ones[i] = 1;
        sequence_of[i] = sequences + i;
    }
    struct llama_batch batch = {
        .n_tokens = count, .token = tokens, .pos = positions,
        .n_seq_id = ones, .seq_id = sequence_of, .logits = wanted,
    };
    return llama_decode(context, batch);
}

int shim_likeliest(void * context, int row, int num_vocab) {
    const float * logits = llama_get_logits_ith(context, row);
    int best = logits ? 0 : -1;
    for (int i = 1; logits && i < num_vocab; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

int shim_forget(void * context, int sequence, int position) {
    return !llama_kv_cache_seq_rm(context, sequence, position, -1);
}

void shim_close(void * context) { llama_free(context); }

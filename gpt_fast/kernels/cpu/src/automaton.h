// A suffix automaton (Blumer et al. 1985): finds the longest ending of a sequence that occurred earlier in it.
//
// A state stands for strings that end at the same places. Its link leads to the state of their longest ending that ends
// at more places. State i >= 0 is the one of the first i tokens. A state that had to be split off another one is a
// copy: copy j has the number -1 - j.
#pragma once

#include <climits>
#include <vector>

#include "common.h"

namespace gpt_fast {

class Automaton {
public:
    // Appends `tokens`. An automaton that gets no memory for them gives all of its memory back and finds nothing from
    // then on.
    void extend(const int32_t* tokens, int64_t count) noexcept {
        if (failed_) return;
        try {
            for (int64_t i = 0; i < count; ++i) append(tokens[i]);
        } catch (...) {
            *this = Automaton();
            failed_ = true;
        }
    }

    // Tokens of the longest ending that occurred before.
    int32_t match_length() const { return match_length_; }

    // Writes `most` tokens that followed that ending where it occurred last; a repetition goes on repeating. Returns
    // how many it wrote.
    int64_t guess(int32_t* drafts, int64_t most) const {
        if (match_length_ == 0) return 0;
        const int64_t begin = match_place_ + 1, period = static_cast<int64_t>(tokens_.size()) - begin;
        for (int64_t i = 0; i < most; ++i) drafts[i] = tokens_[begin + i % period];
        return most;
    }

    // The length of the longest ending of another sequence `tokens` that occurs in this one. Writes up to `most` tokens
    // that followed it, none of them negative, and how many.
    int32_t find(const int32_t* tokens, int64_t count, int32_t* drafts, int64_t most, int32_t* written) const {
        int32_t at = 0, length = 0;
        *written = 0;
        if (prefixes_.empty()) return 0;
        for (int64_t i = 0; i < count; ++i) {
            int32_t next = follow(at, tokens[i]);
            while (next == 0 && at != 0) {
                at = state(at).link;
                length = length_of(at);
                next = follow(at, tokens[i]);
            }
            if (next == 0) continue;
            at = next;
            ++length;
        }
        if (length == 0) return 0;
        const int64_t end = static_cast<int64_t>(tokens_.size());
        for (int64_t i = state(at).place + 1; i < end && *written < most && tokens_[i] >= 0; ++i)
            drafts[(*written)++] = tokens_[i];
        return length;
    }

    int64_t num_bytes() const {
        return static_cast<int64_t>(sizeof *this + bytes(tokens_) + bytes(prefixes_) + bytes(copies_) + bytes(edges_));
    }

private:
    static constexpr int32_t kNone = INT_MIN;
    static constexpr int kRefreshed = 4;  // shorter endings whose latest place is kept up to date

    struct State {
        int32_t link;
        int32_t place;  // index of the last token of a place where its strings end, a late one
        int32_t edge;   // token of its newest stored edge, or kNone
    };
    struct Copy : State {
        int32_t length;  // of its longest string; that of state i >= 0 is i
    };
    struct Edge {
        int32_t state, token;  // the key
        int32_t target;        // 0: this place of the table is free
        int32_t next;          // token of the edge that its state got before, or kNone
    };

    State& state(int32_t s) { return s >= 0 ? prefixes_[s] : copies_[-1 - s]; }
    const State& state(int32_t s) const { return s >= 0 ? prefixes_[s] : copies_[-1 - s]; }
    int32_t length_of(int32_t s) const { return s >= 0 ? s : copies_[-1 - s].length; }

    void append(int32_t token) {
        const auto place = static_cast<int32_t>(tokens_.size());
        if (place == 0) push(prefixes_, State{kNone, -1, kNone});
        const int32_t whole = place + 1;
        push(tokens_, token);
        push(prefixes_, State{0, place, kNone});
        int32_t at = prefixes_[place].link, found = 0;
        while (at != kNone && (found = follow(at, token)) == 0) {
            connect(at, token, whole);
            at = state(at).link;
        }
        if (at != kNone) at = branch(at, token, found);
        at = at == kNone ? 0 : at;
        prefixes_[whole].link = at;
        match_length_ = length_of(at);
        match_place_ = state(at).place;
        for (int i = 0; i < kRefreshed && at != 0; ++i, at = state(at).link) state(at).place = place;
    }

    // The state of the longest string of `at` with `token` behind it, which leads to `found`: that one, or a copy where
    // it stands for longer strings, too.
    int32_t branch(int32_t at, int32_t token, int32_t found) {
        const int32_t length = length_of(at) + 1;
        if (length_of(found) == length) return found;
        const int32_t copy = -1 - static_cast<int32_t>(copies_.size());
        push(copies_, Copy{{state(found).link, state(found).place, kNone}, length});
        if (found >= 0) connect(copy, tokens_[found], found + 1);
        for (int32_t t = state(found).edge; t != kNone;) {
            const Edge e = edges_[slot(found, t)];
            connect(copy, t, e.target);
            t = e.next;
        }
        state(found).link = copy;
        for (; at != kNone && follow(at, token) == found; at = state(at).link) edges_[slot(at, token)].target = copy;
        return copy;
    }

    // The state behind `s` and `token`, or 0. The edge from the first i tokens to the first i + 1 is not stored: it
    // always stays, because branch() changes edges of shorter strings only.
    int32_t follow(int32_t s, int32_t token) const {
        if (s >= 0 && s < static_cast<int32_t>(tokens_.size()) && tokens_[s] == token) return s + 1;
        return edges_.empty() ? 0 : edges_[slot(s, token)].target;
    }

    void connect(int32_t s, int32_t token, int32_t target) {
        if (4 * (num_edges_ + 1) > 3 * edges_.size()) {
            std::vector<Edge> old(64 + 2 * num_edges_);
            old.swap(edges_);
            for (const Edge& e : old)
                if (e.target != 0) edges_[slot(e.state, e.token)] = e;
        }
        edges_[slot(s, token)] = {s, token, target, state(s).edge};
        state(s).edge = token;
        ++num_edges_;
    }

    // The place of the edge of `s` and `token` in the table: where it is, or the first free one from its hash on.
    size_t slot(int32_t s, int32_t token) const {
        uint64_t hash = static_cast<uint64_t>(static_cast<uint32_t>(s)) << 32 | static_cast<uint32_t>(token);
        hash = (hash ^ hash >> 32) * 0x9e3779b97f4a7c15u;
        hash = (hash ^ hash >> 32) * 0x9e3779b97f4a7c15u;
        size_t i = static_cast<size_t>((hash >> 32) * edges_.size() >> 32);
        while (edges_[i].target != 0 && (edges_[i].state != s || edges_[i].token != token))
            i = i + 1 < edges_.size() ? i + 1 : 0;
        return i;
    }

    // Vectors grow by a quarter at a time: by default they would double, and half of them might be empty.
    template <class T>
    static void push(std::vector<T>& to, const T& value) {
        if (to.size() == to.capacity()) to.reserve(to.size() + to.size() / 4 + 16);
        to.push_back(value);
    }
    template <class T>
    static size_t bytes(const std::vector<T>& of) {
        return of.capacity() * sizeof(T);
    }

    std::vector<int32_t> tokens_;
    std::vector<State> prefixes_;
    std::vector<Copy> copies_;
    std::vector<Edge> edges_;  // a hash table with open addressing
    size_t num_edges_ = 0;
    int32_t match_length_ = 0, match_place_ = -1;
    bool failed_ = false;
};

}  // namespace gpt_fast

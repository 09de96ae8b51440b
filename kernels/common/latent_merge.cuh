// How tiles of several items end, of attention over latent rows: all CTAs that worked on one
// wait for each other, if they can, and merge a share each.
#pragma once
#include "common/latent_slots.cuh"

namespace cukv {

// The gate of a tile of several items, behind which all of its slots are written.
//
// An item's CTA arrives when its slot is written, and the last one opens the gate. A CTA that has
// nothing else to do waits there to merge its share of the tile's rows; but not for ever, since the
// others may not be running. One that leaves says so, and then the last to arrive merges all
// shares. A share comes out the same whoever merges it, once or twice.
struct Gate {
    static constexpr int32_t LEFT = 1 << 10;        // after which a CTA that has left counts
    static constexpr int32_t OPENED = 1 << 20;      // how often the gate was opened, modulo 2^12
    static constexpr long long PATIENCE = 1 << 16;  // clocks, several times what a merge takes
    enum Shares : int32_t { NONE, OWN, ALL, NOT_YET };  // of a tile, for a CTA to merge

    // A CTA's way through the gate of its item's tile, in shared memory; one thread goes it.
    Item item;
    int32_t opened;  // the ticket's upper bits before
    Shares shares;

    // The tile's ticket: items that have arrived, CTAs that have left, openings.
    __device__ __forceinline__ int32_t* ticket(const WorkList& work, int kv_head) const {
        return work.tickets + int64_t{item.first_slot} * work.num_kv_heads + kv_head;
    }

    // Behind a barrier after the slot was written, if there is one.
    __device__ __forceinline__ void arrive(const WorkList& work, const Item& of, int kv_head) {
        item = of;
        shares = NONE;
        if (item.first_slot < 0 || item.num_rows == 0) {
            return;
        }
        const uint32_t before = atom_add_acq_rel(ticket(work, kv_head), 1);
        opened = before / OPENED;
        shares = NOT_YET;
        if (before % LEFT == item.num_items - 1) {
            // By an addition, which hands on what the arrivals before it have published.
            const uint32_t next = (before / OPENED + 1) * OPENED;
            atomicAdd(reinterpret_cast<uint32_t*>(ticket(work, kv_head)), next - (before + 1));
            shares = before % OPENED < LEFT ? OWN : ALL;
        }
    }

    // Settles which shares to merge; their slots can be read behind a barrier.
    __device__ __forceinline__ void wait(const WorkList& work, int kv_head) {
        const long long begin = clock64();
        while (shares == NOT_YET) {
            const uint32_t found = ld_acquire(ticket(work, kv_head));
            if (found / OPENED != opened || found % LEFT == item.num_items) {
                shares = OWN;
            } else if (clock64() - begin > PATIENCE) {
                // Leaves, unless an item arrives first.
                const uint32_t left = atomicCAS(
                    reinterpret_cast<uint32_t*>(ticket(work, kv_head)), found, found + LEFT);
                shares = left == found ? NONE : NOT_YET;
            }
        }
    }
};

// Merges shares of a tile whose slots are written: the i-th of num_items shares is an equal run of
// vectors of eight sums. THREADS threads with their own barrier `sync`.
//
// What counts is how often they wait for the L2: sums are on their way while their weights are
// worked out, and where there are more threads than vectors, they take turns with a vector's items.
template <typename Slots, int THREADS, typename Sync>
struct LatentMerge {
    static constexpr int VECS = Slots::VECS, STRETCH_VECS = Slots::STRETCH_VECS;

    struct Scratch {
        float sums[THREADS][8];
        // Of the stretches of a share, for each item.
        float weights[Slots::NUM_STRETCHES + 2 * MAX_LATENT_ITEMS];
    };

    const LatentParams& p;
    const Item& item;
    int block;
    int thread_idx;
    Scratch& scratch;  // in shared memory
    Sync sync;

    __device__ __forceinline__ void merge(Gate::Shares shares) const {
        const int32_t n = shares == Gate::ALL ? item.num_items : shares == Gate::OWN;
        for (int32_t i = 0; i < n; ++i) {
            const int32_t share = shares == Gate::ALL ? i : item.item_idx;
            const int32_t total = item.num_rows * VECS;
            const int32_t begin = total * share / item.num_items;
            const int32_t end = total * (share + 1) / item.num_items;
            if (end - begin > THREADS) {
                merge_many<2, 8>(begin, end);
            } else if (end > begin) {
                merge_few<16>(begin, end);
            }
        }
    }

    // Vectors [begin, end), NUM by a thread at a time, IN_FLIGHT items of each.
    template <int NUM, int IN_FLIGHT>
    __device__ __forceinline__ void merge_many(int32_t begin, int32_t end) const {
        bool weighed = false;
        int32_t base = begin + thread_idx;
        do {
            float sums[NUM][8] = {};
            int32_t first = 0;
            do {
                uint4 x[IN_FLIGHT][NUM];
                load(x, base, end, first, 1);
                if (!weighed) {
                    weigh(begin, end);
                    sync();  // weights are there
                    weighed = true;
                }
                add_up(sums, x, base, begin, end, first, 1);
                first += IN_FLIGHT;
            } while (first < item.num_items);
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                store(sums[i], base + i * THREADS, end);
            }
            base += NUM * THREADS;
        } while (base < end);
        sync();  // weights have been read
    }

    // No more vectors than threads.
    template <int IN_FLIGHT>
    __device__ __forceinline__ void merge_few(int32_t begin, int32_t end) const {
        const int32_t width = end - begin;
        const int32_t turns = min(THREADS / width, int32_t{item.num_items});
        const int32_t turn = thread_idx / width;
        // Threads without a turn load and weigh nothing.
        const int32_t vec = turn < turns ? begin + thread_idx - turn * width : end;
        float sums[1][8] = {};
        int32_t first = turn;
        bool weighed = false;
        do {
            uint4 x[IN_FLIGHT][1];
            load(x, vec, end, first, turns);
            if (!weighed) {
                weigh(begin, end);
                sync();  // weights are there
                weighed = true;
            }
            add_up(sums, x, vec, begin, end, first, turns);
            first += IN_FLIGHT * turns;
        } while (first < item.num_items);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            scratch.sums[thread_idx][e] = sums[0][e];
        }
        sync();  // sums of all turns are there
        if (thread_idx < width) {
            for (int32_t i = 1; i < turns; ++i) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    sums[0][e] += scratch.sums[thread_idx + i * width][e];
                }
            }
            store(sums[0], begin + thread_idx, end);
        }
        sync();  // weights and sums have been read
    }

    // Starts loading vectors base + i * THREADS of items first + k * stride, as far as they exist.
    template <int IN_FLIGHT, int NUM>
    __device__ __forceinline__ void load(
        uint4 (&x)[IN_FLIGHT][NUM], int32_t base, int32_t end, int32_t first, int32_t stride)
        const {
        const Slots slots{{p.work, item, block}};
        const int64_t slot = int64_t{p.work.num_kv_heads} * Slots::FLOATS;
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            const int32_t vec = base + i * THREADS, row = vec / VECS;
            const int32_t num_items = vec < end ? item.num_items : 0;
            // The slots of all items but the first are neighbours. Instructions that are read once
            // are what a merge waits for: here they are few for each item.
            const uint4* of_first = Slots::vecs(slots.row(0, row)) + vec % VECS;
            const uint4* from = Slots::vecs(slots.row(1, row) + (first - 1) * slot) + vec % VECS;
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                x[k][i] = uint4{};
                if (first + k * stride < num_items) {
                    x[k][i] = __ldcg(k == 0 && first == 0 ? of_first : from);
                }
                from += stride * slot / 4;
            }
        }
    }

    // Adds them up with their weights.
    template <int IN_FLIGHT, int NUM>
    __device__ __forceinline__ void add_up(
        float (&sums)[NUM][8],
        const uint4 (&x)[IN_FLIGHT][NUM],
        int32_t base,
        int32_t begin,
        int32_t end,
        int32_t first,
        int32_t stride) const {
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            const int32_t vec = min(base + i * THREADS, end - 1);
            const int32_t stretch = vec / STRETCH_VECS - begin / STRETCH_VECS;
            const float* weights = scratch.weights + stretch * item.num_items;
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                const float w = weights[min(first + k * stride, item.num_items - 1)];
                const Vec<half, 8> halves{x[k][i]};
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    sums[i][e] = fmaf(w, to_float(halves[e]), sums[i][e]);
                }
            }
        }
    }

    __device__ __forceinline__ void store(const float (&sums)[8], int32_t vec, int32_t end) const {
        if (vec < end) {
            LatentRow(p, item, block, vec / VECS).template store<2>(1.0f, [&](auto visit) {
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    visit({sums[2 * pair], sums[2 * pair + 1]}, Slots::feat(vec % VECS, pair));
                }
            });
        }
    }

    // Weights of all items for each stretch of [begin, end), in its units, and the lse of rows that
    // begin there. A stretch belongs to `width` neighbouring lanes, which weigh STATES items each.
    __device__ __forceinline__ void weigh(int32_t begin, int32_t end) const {
        if (item.num_items <= WARP_SIZE) {
            weigh_items<1>(begin, end);
        } else {
            weigh_items<MAX_LATENT_ITEMS / WARP_SIZE>(begin, end);
        }
    }

    template <int STATES>
    __device__ __forceinline__ void weigh_items(int32_t begin, int32_t end) const {
        int width = 2;
        while (width < item.num_items && width < WARP_SIZE) {
            width *= 2;
        }
        const int lane_idx = thread_idx % width;
        const Slots slots{{p.work, item, block}};
        const int first = begin / STRETCH_VECS, last = (end - 1) / STRETCH_VECS;
        for (int base = first; base <= last; base += THREADS / width) {
            const int stretch = min(base + thread_idx / width, last);
            const int row = stretch / Slots::STRETCHES;
            float2 md[STATES];
            float units[STATES];
            float m = NO_KEY;
#pragma unroll
            for (int k = 0; k < STATES; ++k) {
                const int i = lane_idx + k * width;
                md[k] = make_float2(NO_KEY, 0.0f);
                units[k] = 0.0f;
                if (i < item.num_items) {
                    const float* from = p.work.states + slots.slots.slot_row(i, row) * 2;
                    md[k] = __ldcg(reinterpret_cast<const float2*>(from));
                    units[k] = __ldcg(Slots::units(slots.row(i, row)) + stretch % Slots::STRETCHES);
                }
                m = fmaxf(m, md[k].x);
            }
            for (int distance = width / 2; distance > 0; distance /= 2) {
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, distance));
            }
            const float base_m = m > NO_KEY ? m : 0.0f;
            float d = 0.0f;
#pragma unroll
            for (int k = 0; k < STATES; ++k) {
                md[k].x = ex2(md[k].x - base_m);
                d = fmaf(md[k].x, md[k].y, d);
            }
            for (int distance = width / 2; distance > 0; distance /= 2) {
                d += __shfl_xor_sync(0xffffffffu, d, distance);
            }
            const float factor = LatentRow::factor(p, d);
#pragma unroll
            for (int k = 0; k < STATES; ++k) {
                const int i = lane_idx + k * width;
                if (i < item.num_items) {
                    scratch.weights[(stretch - first) * item.num_items + i] =
                        md[k].x * factor * units[k];
                }
            }
            if (lane_idx == 0 && stretch % Slots::STRETCHES == 0 && row * VECS >= begin) {
                LatentRow(p, item, block, row).store_lse(m, d);
            }
        }
    }
};

}  // namespace cukv

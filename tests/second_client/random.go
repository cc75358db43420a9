package main

// numpy.random.Generator(PCG64(SeedSequence(seed, spawn_key))): batches, noise and golden runs (section 8).

import (
	"math/bits"
)

type pcg64 struct {
	high, low, stepHigh, stepLow uint64
	upper                        uint32 // the half of a draw that the next 32-bit draw takes
	kept                         bool
}

func newPCG64(seed uint64, spawn ...uint32) *pcg64 {
	state := seedSequence(seed, spawn)
	g := &pcg64{stepHigh: state[2]<<1 | state[3]>>63, stepLow: state[3]<<1 | 1}
	g.step()
	var carry uint64
	g.low, carry = bits.Add64(g.low, state[1], 0)
	g.high, _ = bits.Add64(g.high, state[0], carry)
	g.step()
	return g
}

func (g *pcg64) step() {
	const multHigh, multLow = 2549297995355413924, 4865540595714422341
	high, low := bits.Mul64(g.low, multLow)
	high += g.high*multLow + g.low*multHigh
	var carry uint64
	g.low, carry = bits.Add64(low, g.stepLow, 0)
	g.high, _ = bits.Add64(high, g.stepHigh, carry)
}

func (g *pcg64) uint64() uint64 {
	g.step()
	return bits.RotateLeft64(g.high^g.low, -int(g.high>>58))
}

func (g *pcg64) uint32() uint32 {
	if g.kept {
		g.kept = false
		return g.upper
	}
	draw := g.uint64()
	g.upper, g.kept = uint32(draw>>32), true
	return uint32(draw)
}

func (g *pcg64) float32() float64 { return float64(g.uint32()>>8) / (1 << 24) }

func (g *pcg64) permutation(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	for i := n - 1; i > 0; i-- {
		mask := uint32(1)<<bits.Len32(uint32(i)) - 1
		j := g.uint32() & mask
		for j > uint32(i) {
			j = g.uint32() & mask
		}
		order[i], order[j] = order[j], order[i]
	}
	return order
}

// below draws from 0 to n - 1 as Generator.integers(n) does: by Lemire's multiplication.
func (g *pcg64) below(n uint32) int {
	if n == 1 {
		return 0
	}
	product := uint64(g.uint32()) * uint64(n)
	for limit := -n % n; uint32(product) < limit; {
		product = uint64(g.uint32()) * uint64(n)
	}
	return int(product >> 32)
}

func seedSequence(seed uint64, spawn []uint32) (state [4]uint64) {
	entropy := []uint32{uint32(seed)}
	if seed>>32 > 0 {
		entropy = append(entropy, uint32(seed>>32))
	}
	if len(spawn) > 0 {
		entropy = append(append(entropy, make([]uint32, 4-len(entropy))...), spawn...)
	}
	constant := uint32(0x43b0d7e5)
	hash := func(value uint32) uint32 {
		value ^= constant
		constant *= 0x931e8875
		value *= constant
		return value ^ value>>16
	}
	mix := func(x, y uint32) uint32 {
		value := 0xca01f9dd*x - 0x4973f715*y
		return value ^ value>>16
	}
	var pool [4]uint32
	for i := range pool {
		if i < len(entropy) {
			pool[i] = hash(entropy[i])
		} else {
			pool[i] = hash(0)
		}
	}
	for from := range pool {
		for to := range pool {
			if from != to {
				pool[to] = mix(pool[to], hash(pool[from]))
			}
		}
	}
	for i := 4; i < len(entropy); i++ {
		for to := range pool {
			pool[to] = mix(pool[to], hash(entropy[i]))
		}
	}
	constant = 0x8b51f9dd
	for i := 0; i < 8; i++ {
		value := pool[i%4] ^ constant
		constant *= 0x58f38ded
		value *= constant
		state[i/2] |= uint64(value^value>>16) << (32 * (i % 2))
	}
	return
}

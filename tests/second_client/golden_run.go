package main

// The golden run of a program: it shows that this client computes the step that the signed containers hold (section 8).

import (
	"math"
	"strings"
)

// goldenDraw reads one list of random numbers over and over.
type goldenDraw struct {
	numbers []float64
	next    int
}

func newGoldenDraw(seed uint64) *goldenDraw {
	d, g := &goldenDraw{}, newPCG64(seed)
	for i := 0; i < 65521; i++ {
		d.numbers = append(d.numbers, g.float32())
	}
	return d
}

func (d *goldenDraw) u() float64 {
	d.next++
	return d.numbers[(d.next-1)%len(d.numbers)]
}

func f32(v float64) float64 { return float64(float32(v)) }

// state draws the inputs that are not fresh, by port name.
func (d *goldenDraw) state(p *program, pull float64) map[string][]float64 {
	drawn := map[string][]float64{}
	for _, in := range p.step {
		kind, tensor, _ := strings.Cut(in.name, "/")
		if tensor == "" {
			continue
		}
		values := make([]float64, product(in.shape))
		for i := range values {
			u := d.u()
			c := u - 0.5
			switch {
			case kind == "w" && len(in.shape) > 1:
				values[i] = c * math.Sqrt(24/float64(product(in.shape[1:])))
			case kind == "w":
				values[i] = 0.5 + 0.5*c
			case kind == "buffers":
				values[i] = 0.5 + u
			case kind == "anchor":
				values[i] = drawn["w/"+tensor][i] + 16*pull*c
			default:
				values[i] = 4 * pull * c
			}
			values[i] = f32(values[i])
		}
		drawn[in.name] = values
	}
	return drawn
}

// fresh draws the inputs of one step; `y` comes one-hot.
func (d *goldenDraw) fresh(p *program, rows int) map[string][]float64 {
	drawn := map[string][]float64{}
	for _, in := range p.step {
		if len(in.shape) == 0 || in.shape[0] != -1 {
			continue
		}
		width := product(in.shape[1:])
		for j := 0; j < rows; j++ {
			if in.name == "y" {
				one := make([]float64, width)
				one[int(d.u()*float64(width))] = 1
				drawn["y"] = append(drawn["y"], one...)
				continue
			}
			for i := 0; i < width; i++ {
				u := d.u()
				v := map[string]float64{"x": 4 * (u - 0.5), "q": (u + 0.5) / float64(rows), "noise": u}[in.name]
				drawn[in.name] = append(drawn[in.name], f32(v))
			}
		}
	}
	return drawn
}

func (d *goldenDraw) signs(n int) []float64 {
	signs := make([]float64, n)
	for i := range signs {
		signs[i] = 1
		if d.u() < 0.5 {
			signs[i] = -1
		}
	}
	return signs
}

func (p *program) flat(drawn map[string][]float64, kind string) (vector []float64) {
	for _, r := range p.schema {
		vector = append(vector, drawn[kind+"/"+r.name]...)
	}
	return
}

func fold(flat []float64, width int) (rows [][]float64) {
	for at := 0; at < len(flat); at += width {
		rows = append(rows, flat[at:at+width])
	}
	return
}

// goldenDifference plays the program's golden run with this client's own step: it shows that the step is the program's.
func (p *program) goldenDifference() float64 {
	run := p.golden
	pull, _ := number(run["pull"])
	lr, _ := number(run["lr"])
	d := newGoldenDraw(uint64(run["seed"].(int64)))
	drawn := d.state(p, pull)
	s := &sgd{p.flat(drawn, "w"), p.flat(drawn, "velocity"), p.flat(drawn, "anchor"), p.flat(drawn, "linear")}
	start, expected, batch := append([]float64{}, s.w...), numbers(run["losses"]), int(run["batch"].(int64))
	losses := []float64{}
	for k := range expected {
		rows := batch
		if k == len(expected)-1 {
			rows = int(math.Max(1, math.Floor(0.625*float64(batch))))
		}
		in := d.fresh(p, rows)
		losses = append(losses, p.train(s, fold(in["x"], p.inputs), fold(in["y"], p.classes), in["q"], lr, 0.5, 0.25))
	}
	digest, at := make([]float64, 8), 0
	for _, r := range p.schema {
		for i, sign := range d.signs(r.size()) {
			digest[i%8] += sign * (s.w[at+i] - start[at+i]) / math.Sqrt(float64(r.size()))
		}
		at += r.size()
	}
	return math.Max(apart(losses, expected), apart(digest, numbers(run["weights"])))
}

func apart(found, expected []float64) float64 {
	off, size := 0.0, 0.0
	for i := range expected {
		off += (found[i] - expected[i]) * (found[i] - expected[i])
		size += expected[i] * expected[i]
	}
	if ratio := math.Sqrt(off / size); !math.IsNaN(ratio) {
		return ratio
	}
	return math.Inf(1)
}

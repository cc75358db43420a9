package main

// program.json, and a model that this client computes with its own code: softmax regression (section 8).

import (
	"math"
	"strings"
)

type port struct {
	name  string
	shape []int // -1 is the batch
}

type program struct {
	schema     schema
	raw        object
	step       []port // inputs of `step` in their order
	inputs     int    // values of a sample
	classes    int
	hasLinear  bool
	sha        string
	containers object // of this client's engine, by function
	golden     object // the golden run of the engine, or nil
}

func list(value any) []any { l, _ := value.([]any); return l }

func readShape(value any) (shape []int) {
	dims, ok := value.([]any)
	need(ok, "bad_program", "a shape")
	for _, d := range dims {
		if n, isInt := d.(int64); isInt && n >= 1 && n < 1<<31 {
			shape = append(shape, int(n))
		} else {
			need(d == "batch", "bad_program", "a shape")
			shape = append(shape, -1)
		}
	}
	return
}

func readProgram(text []byte, engine string) *program {
	p := &program{sha: sha256Of(text)}
	need(attempt(func() { p.raw = readObject(text) }) == nil, "bad_program", "program.json is not strict JSON")
	need(p.raw["v"] == int64(1), "bad_version", "v of program.json")
	for _, value := range list(p.raw["schema"]) {
		fields := list(value)
		need(len(fields) == 3, "bad_program", "a row of the schema")
		name, _ := fields[0].(string)
		role, _ := fields[1].(string)
		need(name != "" && !strings.Contains(name, "#") && (role == "p" || role == "b"), "bad_program", "a row of the schema")
		p.schema = append(p.schema, row{name, role, readShape(fields[2])})
	}
	classifier, isList := p.raw["classifier"].([]any)
	parity, isObject := p.raw["parity"].(object)
	need(isList && isObject && len(texts(classifier)) == len(classifier), "bad_program", "classifier or parity")
	for _, off := range parity {
		_, isNumber := number(off)
		need(isNumber, "bad_program", "parity")
	}
	functions, _ := p.raw["functions"].(object)
	step, _ := functions["step"].(object)
	for _, value := range list(step["inputs"]) {
		fields := list(value)
		need(len(fields) == 3, "bad_program", "an input of step")
		name, _ := fields[0].(string)
		p.step = append(p.step, port{name, readShape(fields[2])})
	}
	engines, _ := p.raw["containers"].(object)
	p.containers, _ = engines[engine].(object)
	if value, there := p.raw["golden"]; there && value != nil {
		runs, ok := value.(object)
		need(ok && functions["step"] != nil, "bad_program", "golden runs without a step")
		for name, run := range runs {
			of, _ := engines[name].(object)
			batches, _ := p.raw["batch"].(object)
			need(of["step"] != nil, "bad_program", "a golden run of an engine without a step")
			p.checkGolden(run, batches[name])
		}
		for name, of := range engines {
			functions, _ := of.(object)
			need(functions["step"] == nil || runs[name] != nil, "bad_program", "an engine's step without a golden run")
		}
		p.golden, _ = runs[engine].(object)
	}
	return p
}

func (p *program) checkGolden(value, batch any) {
	run, ok := value.(object)
	need(ok, "bad_program", "a golden run")
	whole := func(name string, low, high int64) bool {
		n, isInt := run[name].(int64)
		return isInt && n >= low && n <= high
	}
	need(whole("seed", 0, 1<<53-1) && whole("batch", 1, 65536) && whole("tokens", 0, 1<<24), "bad_program", "seed, batch or tokens of a golden run")
	need(batch == "any" || batch == run["batch"], "bad_program", "the batch of a golden run is not its engine's")
	for _, name := range []string{"lr", "pull", "tolerance"} {
		x, isNumber := number(run[name])
		need(isNumber && x > 0 && (name != "tolerance" || x <= 0.1), "bad_program", "%s of a golden run", name)
	}
	buffers := 0
	for _, r := range p.schema {
		if r.role == "b" {
			buffers = 8
		}
	}
	losses := numbers(run["losses"])
	need(len(losses) >= 1 && len(losses) <= 16 && len(numbers(run["weights"])) == 8, "bad_program", "losses or weights of a golden run")
	need(len(numbers(run["buffers"])) == buffers && run["buffers"] != nil, "bad_program", "buffers of a golden run")
}

func number(value any) (float64, bool) {
	switch value := value.(type) {
	case int64:
		return float64(value), true
	case float64:
		return value, true
	}
	return 0, false
}

func numbers(value any) (out []float64) {
	for _, one := range list(value) {
		x, ok := number(one)
		if !ok {
			return nil
		}
		out = append(out, x)
	}
	return
}

// checkModel refuses a program whose step this client cannot be: it has code for a matrix [classes, inputs] and a bias [classes].
func (p *program) checkModel(engine string) {
	shape := readShape(p.raw["input"])
	p.inputs = product(shape)
	target := readShape(p.raw["target"])
	batches, _ := p.raw["batch"].(object)
	need(batches[engine] == "any", "bad_program", "this client takes batches of any size")
	linear := len(p.schema) == 2 && len(p.schema[0].shape) == 2 && len(p.schema[1].shape) == 1 && len(target) == 1
	need(linear && p.raw["loss"] == "cross-entropy" && p.raw["optimizer"] == "sgd", "bad_program", "this client computes softmax regression only")
	p.classes = target[0]
	fits := p.schema[0].shape[0] == p.classes && p.schema[0].shape[1] == p.inputs && p.schema[1].shape[0] == p.classes
	need(fits && p.schema[0].role == "p" && p.schema[1].role == "p", "bad_program", "this client computes softmax regression only")
}

func (p *program) logits(w, x []float64) []float64 {
	out := make([]float64, p.classes)
	for c := range out {
		out[c] = w[p.classes*p.inputs+c]
		for i, v := range x {
			out[c] += w[c*p.inputs+i] * v
		}
	}
	return out
}

// softmax returns the probabilities and the log of their sum before scaling.
func softmax(scores []float64) (shares []float64, logSum float64) {
	top, sum := scores[0], 0.0
	for _, s := range scores {
		top = math.Max(top, s)
	}
	shares = make([]float64, len(scores))
	for i, s := range scores {
		shares[i] = math.Exp(s - top)
		sum += shares[i]
	}
	for i := range shares {
		shares[i] /= sum
	}
	return shares, top + math.Log(sum)
}

// gradient adds the gradient of sum_j q_j loss(w; x_j, y_j) to g and returns that sum.
func (p *program) gradient(g, w []float64, x, y [][]float64, q []float64) (loss float64) {
	for j := range x {
		scores := p.logits(w, x[j])
		shares, logSum := softmax(scores)
		mass := 0.0
		for c, t := range y[j] {
			loss += q[j] * t * (logSum - scores[c])
			mass += t
		}
		for c := range shares {
			d := q[j] * (mass*shares[c] - y[j][c])
			g[p.classes*p.inputs+c] += d
			for i, v := range x[j] {
				g[c*p.inputs+i] += d * v
			}
		}
	}
	return
}

type sgd struct{ w, velocity, anchor, linear []float64 }

func (p *program) train(s *sgd, x, y [][]float64, q []float64, lr, momentum, mu float64) float64 {
	g := append([]float64{}, s.linear...)
	loss := p.gradient(g, s.w, x, y, q)
	for i := range s.w {
		s.velocity[i] = momentum*s.velocity[i] + g[i] + mu*(s.w[i]-s.anchor[i])
	}
	for i := range s.w {
		s.w[i] -= lr * s.velocity[i]
	}
	return loss
}

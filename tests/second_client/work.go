package main

// What a device computes for a task: section 8. The worker's refusals become `nack`.

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
)

type samples struct {
	x      [][]float64
	labels []int
}

// work is one task in progress.
type work struct {
	*client
	ctx  context.Context
	task object
	p    *program
	// what the task changes on the device; it is stored together with the answer, in one write
	after []func(*memory)
}

// answer is what a task leaves: a blob to upload, and what the device keeps with it.
type answer struct {
	What    string
	N       int
	Metrics object
	Data    []byte
	// the residual that `ok` or `dup` commits, and its name
	Residual *residual
	Of       string
}

func (w *work) perform() *answer {
	w.p = w.program(w.task, map[bool]string{true: "step", false: "evaluate"}[w.task["job"] == "fit" || wantsGrad(w.task)])
	var a *answer
	switch w.task["job"] {
	case "fit":
		a = w.fit(w.task)
	case "probe":
		a = w.probe(w.task)
	case "sum":
		a = w.sum()
	}
	most := w.task["reply"].(object)["max_size"].(int64)
	need(int64(len(a.Data)) <= most || a.What == "stats", "too_big", "an answer of %d bytes", len(a.Data))
	return a
}

func wantsGrad(task object) bool { return contains(texts(task["want"]), "grad") }

// program fetches and checks what the task would run, in the order of section 5.
func (w *work) program(task object, function string) *program {
	m := readManifest(task["program"])
	w.ring.check(w.federation, m)
	p := readProgram(w.fetch(w.ctx, m), w.engine)
	need(p.schema.sha() == task["schema"], "bad_program", "the program has another schema than the task")
	if task["job"] != "sum" {
		listed, _ := p.containers[function].(object)
		need(listed["sha256"] == task["container"].(object)["sha256"], "bad_program", "the program does not list the task's container for %s", function)
	}
	p.checkModel(w.engine)
	need(p.golden != nil, "no_engine", "a program without a golden run: this client could not show that its step is the program's")
	if w.passed != p.sha {
		tolerance, _ := number(p.golden["tolerance"])
		off := p.goldenDifference()
		w.say(object{"event": "golden run", "difference": off})
		need(off <= tolerance, "no_engine", "the golden run is off by %g", off)
		w.passed = p.sha
	}
	return p
}

func (w *work) vector(value any, kind string) ([]float64, string) {
	m := readManifest(value, kind)
	w.ring.check(w.federation, m)
	return readVector(w.fetch(w.ctx, m), w.p.schema, kind), m.sha
}

const maxSlots = 64 // of a run

// kept is the model that this device trained last in this run and slot, or nil.
func (w *work) kept(slot string) []float64 {
	w.lock.Lock()
	defer w.lock.Unlock()
	if file, there := w.disk.Slots[w.task["run"].(string)+"/"+slot]; there {
		var vector []float64
		if attempt(func() { vector = readVector(file, w.p.schema, "model") }) == nil {
			return vector
		}
	}
	return nil
}

func (w *work) keep(slot string, vector []float64) {
	file := writeVector("model", "", w.p.schema, vector)
	run, others := w.task["run"].(string)+"/", 0
	w.lock.Lock()
	for name := range w.disk.Slots {
		if strings.HasPrefix(name, run) && name != run+slot {
			others++
		}
	}
	w.lock.Unlock()
	need(others < maxSlots, "bad_task", "a run has %d slots at most", maxSlots)
	w.after = append(w.after, func(disk *memory) {
		for name := range disk.Slots {
			if !strings.HasPrefix(name, run) {
				delete(disk.Slots, name)
			}
		}
		disk.Slots[run+slot] = file
	})
}

func text(task object, name, otherwise string) string {
	if value, ok := task[name].(string); ok {
		return value
	}
	return otherwise
}

// own is the model of a slot, or the one that a task gives for a device that keeps none.
func (w *work) own(slot string, init any) []float64 {
	vector := w.kept(slot)
	if vector == nil {
		need(init != nil, "no_own_model", "no model in slot %s", slot)
		vector, _ = w.vector(init, "model")
	}
	return vector
}

func (w *work) fit(task object) *answer {
	trained, bases, loss := w.trained(task)
	slot := text(task, "slot", "main")
	n := len(w.train.x)
	w.keep(slot, trained)
	if task["upload"] == false {
		file := writeTensors("stats", "f32", w.p.schema.sha(), "", []tensor{{"loss", "F64", []int{1}, []float64{loss}}})
		return &answer{What: "stats", N: n, Metrics: object{"loss": loss}, Data: file}
	}
	reply := task["reply"].(object)
	base := bases[reply["base"].(string)]
	delta := make([]float64, len(trained))
	for i := range delta {
		delta[i] = f32(trained[i] - base.vector[i])
	}
	a := &answer{What: "delta", N: n, Metrics: object{"loss": loss}}
	switch reply["codec"] {
	case "f32":
		a.Data = writeVector("delta", base.sha, w.p.schema, delta)
	case "i8":
		w.writeWithFeedback(a, base.sha, delta)
	default:
		refuse("bad_codec", "this client writes f32 and i8")
	}
	return a
}

// residual is what i8 lost of the updates of a run, center and schema until a round.
type residual struct {
	Round  int64
	Vector []float64
}

func (w *work) writeWithFeedback(a *answer, base string, delta []float64) {
	run, round := w.task["run"].(string), w.task["round"].(int64)
	center, _ := w.task["center"].(int64)
	name := fmt.Sprintf("%s/%d/%v/%s", run, center, w.task["center"] != nil, w.p.schema.sha())
	w.lock.Lock()
	lost := w.disk.Residuals[name]
	w.lock.Unlock()
	if len(lost.Vector) == len(delta) {
		for i := range delta {
			delta[i] = f32(delta[i] + math.Ldexp(lost.Vector[i], -int(math.Max(0, float64(round-lost.Round-1)))))
		}
	}
	data, decoded := writeI8(base, w.p.schema, delta)
	for i := range delta {
		delta[i] = f32(delta[i] - decoded[i])
	}
	a.Data, a.Residual, a.Of = data, &residual{round, delta}, name
}

type base struct {
	vector []float64
	sha    string
}

// trained runs a fit as its task says, and returns the blobs that a delta may be taken from.
func (w *work) trained(task object) ([]float64, map[string]base, float64) {
	bases := map[string]base{"zero": {make([]float64, w.p.schema.size()), "zero"}}
	f := fitting{task: task, seed: uint64(task["seed"].(int64))}
	if task["start"] == "own" {
		f.start = w.own(text(task, "slot", "main"), task["init"])
	} else {
		vector, sha := w.vector(task["start"], "model")
		f.start, bases["start"] = vector, base{vector, sha}
	}
	f.anchor = f.start
	if anchor := task["anchor"]; anchor == "start" {
		bases["anchor"] = bases["start"]
	} else if anchor != nil {
		vector, sha := w.vector(anchor, "model")
		f.anchor, bases["anchor"] = vector, base{vector, sha}
	}
	f.mu, _ = number(task["mu"])
	trained, loss := w.steps(f)
	return trained, bases, loss
}

// fitting is one run of the steps of a fit.
type fitting struct {
	task          object
	start, anchor []float64
	mu            float64
	seed          uint64
}

func (w *work) steps(f fitting) ([]float64, float64) {
	p, x := w.p, w.train
	need(len(x.x) > 0 && len(x.x[0]) == p.inputs, "no_data", "no samples, or samples that do not fit the program")
	s := &sgd{append([]float64{}, f.start...), make([]float64, len(f.start)), f.anchor, make([]float64, len(f.start))}
	if f.task["linear"] != nil {
		s.linear, _ = w.vector(f.task["linear"], "linear")
	}
	lr, _ := number(f.task["lr"])
	momentum, _ := number(f.task["momentum"])
	rule, ruled := f.task["optimiser"].(object)
	moving := newOptimiser(rule, len(f.start))
	steps, batch, rows := int(f.task["steps"].(int64)), int(f.task["batch"].(int64)), w.rows(f.task)
	g, loss, order := newPCG64(f.seed), 0.0, []int{}
	for k := 0; k < steps; k++ {
		need(w.ctx.Err() == nil, "deadline", "stopped after %d steps", k)
		if len(order) == 0 {
			order = g.permutation(len(x.x))
		}
		piece := order[:min(batch, len(order))]
		order = order[len(piece):]
		xs, ys, q := [][]float64{}, [][]float64{}, []float64{}
		for _, i := range piece {
			xs, ys, q = append(xs, x.x[i]), append(ys, p.oneHot(x.labels[i])), append(q, rows[i]/float64(len(piece)))
		}
		if ruled { // the step's velocity is then the gradient
			loss += p.train(s, xs, ys, q, 0, 0, f.mu) / float64(steps)
			moving.move(s.w, s.velocity, lr)
		} else {
			loss += p.train(s, xs, ys, q, lr, momentum, f.mu) / float64(steps)
		}
	}
	for i, v := range s.w {
		s.w[i] = f32(v)
		need(!math.IsNaN(v) && !math.IsInf(s.w[i], 0), "not_finite", "the trained model")
	}
	return s.w, loss
}

func (p *program) oneHot(label int) []float64 {
	need(label >= 0 && label < p.classes, "no_data", "label %d of a model of %d classes", label, p.classes)
	y := make([]float64, p.classes)
	y[label] = 1
	return y
}

// rows are the weights of the samples: ones, ones without some held-out samples, or one candidate's responsibilities of
// this round's probe.
func (w *work) rows(task object) []float64 {
	kind, number, _ := strings.Cut(text(task, "rows", "ones"), ":")
	n := len(w.train.x)
	m, _ := strconv.Atoi(number)
	if kind != "posterior" {
		need(m < n, "no_data", "%d of %d samples are to be held out", m, n)
		ones := make([]float64, n)
		for i := range ones {
			ones[i] = float64(n) / float64(n-m)
		}
		if kind == "all-but" {
			for _, i := range newPCG64(0).permutation(n)[:m] {
				ones[i] = 0
			}
		}
		return ones
	}
	w.lock.Lock()
	defer w.lock.Unlock()
	known := w.disk.Posterior
	need(known.Run == w.task["run"] && known.Round == w.task["round"] && m < len(known.Rows), "no_posterior", "no responsibilities of this round")
	return known.Rows[m]
}

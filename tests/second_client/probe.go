package main

// Probes: section 8.

import (
	"math"
)

func (w *work) chosen(task object) (chosen samples) {
	all := w.train
	if task["split"] == "test" {
		all = w.test
	}
	need(len(all.x) > 0 && len(all.x[0]) == w.p.inputs, "no_data", "no samples of this split")
	limit, limited := task["limit"].(int64)
	if !limited || int(limit) >= len(all.x) {
		return all
	}
	for _, i := range newPCG64(uint64(task["seed"].(int64))).permutation(len(all.x))[:limit] {
		chosen.x, chosen.labels = append(chosen.x, all.x[i]), append(chosen.labels, all.labels[i])
	}
	return
}

func (w *work) counts() []float64 {
	n := make([]float64, w.p.classes)
	for _, label := range w.train.labels {
		n[label]++
	}
	return n
}

// evaluated holds, by model and sample, the losses and the scores.
type evaluated struct{ losses, scores [][][]float64 }

func (w *work) evaluate(models [][]float64, s samples, totals []any) (losses [][]float64, scores [][][]float64) {
	counts := w.counts()
	for m, model := range models {
		losses, scores = append(losses, nil), append(scores, nil)
		for j, x := range s.x {
			out := w.p.logits(model, x)
			if totals != nil && totals[m] != nil {
				total := numbers(totals[m])
				need(len(total) == w.p.classes, "bad_task", "label_totals of %d numbers", len(total))
				for c := range out {
					out[c] += math.Log(counts[c]+0.1) - math.Log(total[c]+0.1)
				}
			}
			_, logSum := softmax(out)
			w.p.oneHot(s.labels[j])
			losses[m], scores[m] = append(losses[m], logSum-out[s.labels[j]]), append(scores[m], out)
		}
		need(w.ctx.Err() == nil, "deadline", "stopped while it evaluated")
	}
	return
}

func mean(values []float64) (sum float64) {
	for _, v := range values {
		sum += v / float64(len(values))
	}
	return
}

// responsibilities are, by sample, the softmax over the models of log prior - loss.
func responsibilities(losses [][]float64, prior []float64) (rows [][]float64) {
	for j := range losses[0] {
		scores := make([]float64, len(losses))
		for m := range losses {
			scores[m] = -losses[m][j]
			if prior != nil {
				scores[m] += math.Log(prior[m])
			}
		}
		shares, _ := softmax(scores)
		rows = append(rows, shares)
	}
	return
}

func (w *work) probe(task object) *answer {
	want := texts(task["want"])
	models := [][]float64{}
	for _, one := range list(task["models"]) {
		if slot, there := one.(object)["own"]; there {
			models = append(models, w.own(slot.(string), one.(object)["init"]))
		} else {
			vector, _ := w.vector(one, "model")
			models = append(models, vector)
		}
	}
	s, tensors := w.chosen(task), []tensor{}
	if want[0] == "labels" {
		counts := w.counts()
		return w.statistics(len(w.train.x), []tensor{{"labels", "F64", []int{w.p.classes}, counts}})
	}
	if want[0] == "grad" {
		g, at := make([]float64, w.p.schema.size()), 0
		for j, x := range s.x {
			w.p.gradient(g, models[0], [][]float64{x}, [][]float64{w.p.oneHot(s.labels[j])}, []float64{1 / float64(len(s.x))})
		}
		for _, r := range w.p.schema {
			tensors = append(tensors, tensor{"grad/" + r.name, "F32", r.shape, g[at : at+r.size()]})
			at += r.size()
		}
		return w.statistics(len(s.x), tensors)
	}
	prior := numbers(task["prior"])
	losses, scores := w.evaluate(models, s, list(task["label_totals"]))
	for _, one := range want {
		tensors = append(tensors, w.statistic(one, task, s, losses, scores, prior))
	}
	return w.statistics(len(s.x), tensors)
}

func (w *work) statistics(n int, tensors []tensor) *answer {
	return &answer{What: "stats", N: n, Data: writeTensors("stats", "f32", w.p.schema.sha(), "", tensors)}
}

func (w *work) statistic(want string, task object, s samples, losses [][]float64, scores [][][]float64, prior []float64) tensor {
	values := make([]float64, len(losses))
	switch want {
	case "loss":
		for m := range losses {
			values[m] = mean(losses[m])
		}
		return tensor{"loss", "F64", []int{len(losses)}, values}
	case "votes":
		for j := range s.x {
			best := 0
			for m := range losses {
				if losses[m][j] < losses[best][j] {
					best = m
				}
			}
			values[best]++
		}
		return tensor{"votes", "I64", []int{len(losses)}, values}
	case "posterior":
		rows := responsibilities(losses, prior)
		byModel := make([][]float64, len(losses))
		for _, shares := range rows {
			for m, share := range shares {
				values[m] += share / float64(len(rows))
				byModel[m] = append(byModel[m], share)
			}
		}
		if text(task, "split", "train") == "train" && task["limit"] == nil {
			kept := posterior{w.task["run"].(string), w.task["round"].(int64), byModel}
			w.after = append(w.after, func(disk *memory) { disk.Posterior = kept })
		}
		return tensor{"posterior", "F64", []int{len(losses)}, values}
	case "confusion":
		return w.confusion(s, scores, prior)
	}
	refuse("bad_task", "this client does not know the statistic %s", want)
	return tensor{}
}

func (w *work) confusion(s samples, scores [][][]float64, prior []float64) tensor {
	classes := w.p.classes
	matrices := len(scores)
	if prior != nil {
		matrices = 1
	}
	counts := make([]float64, matrices*classes*classes)
	for m := 0; m < matrices; m++ {
		for j, label := range s.labels {
			found := scores[m][j]
			if prior != nil {
				found = mixture(scores, j, prior)
			}
			counts[(m*classes+label)*classes+largestOf(found)]++
		}
	}
	return tensor{"confusion", "I64", []int{matrices, classes, classes}, counts}
}

func mixture(scores [][][]float64, j int, prior []float64) []float64 {
	mixed := make([]float64, len(scores[0][j]))
	for m := range scores {
		shares, _ := softmax(scores[m][j])
		for c, share := range shares {
			mixed[c] += prior[m] * share
		}
	}
	return mixed
}

func largestOf(values []float64) (best int) {
	for i, v := range values {
		if v > values[best] {
			best = i
		}
	}
	return
}

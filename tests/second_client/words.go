package main

// The words that a device adds to a sum: section 21. Pure.

import (
	"encoding/binary"
	"math"
	"sort"
)

// ordered puts the greatest score first; of equal ones the first.
func ordered(scores []float64) mine {
	m := mine{Weights: make([]float64, len(scores))}
	for k := range scores {
		m.Order = append(m.Order, k)
	}
	sort.SliceStable(m.Order, func(i, j int) bool { return scores[m.Order[i]] > scores[m.Order[j]] })
	m.Weights[m.Order[0]] = 1
	return m
}

// contribution is the pure part of a sum: models and a choice become words.
type contribution struct {
	task, sum object
	centers   [][]float64
	open      []int
	points    [][][]float64 // by run and cluster
	scale     scale
}

func (c *contribution) columns(vector []float64) (out []float64) {
	width := 0.0
	for _, one := range list(c.sum["compare"]) {
		bounds := numbers(one)
		need(len(bounds) == 2 && bounds[0] >= 0 && bounds[0] < bounds[1] && int(bounds[1]) <= len(vector), "bad_field", "compare of a sum")
		width += bounds[1] - bounds[0]
		need(width <= float64(len(vector)), "bad_task", "more columns than a model of %d has are compared", len(vector))
		out = append(out, vector[int(bounds[0]):int(bounds[1])]...)
	}
	return
}

func readPoints(data []byte, width, clusters int) (points [][][]float64) {
	need(width > 0 && len(data)%(8*width*clusters) == 0 && len(data) > 0, "bad_task", "%d bytes of centroids", len(data))
	flat := make([]float64, len(data)/8)
	for i := range flat {
		flat[i] = math.Float64frombits(binary.LittleEndian.Uint64(data[8*i:]))
		need(!math.IsNaN(flat[i]) && !math.IsInf(flat[i], 0), "not_finite", "centroids")
	}
	rows := fold(flat, width)
	for at := 0; at < len(rows); at += clusters {
		points = append(points, rows[at:at+clusters])
	}
	return
}

func apartSquared(a, b []float64) (apart []float64, d2 float64) {
	apart = make([]float64, len(a))
	for i := range a {
		apart[i] = a[i] - b[i]
		d2 += apart[i] * apart[i]
	}
	return
}

// nearest orders the centers by distance in the compared columns; the last one stays unless another is clearly nearer.
func (c *contribution) nearest(model, last []float64) mine {
	distances, scores := []float64{}, []float64{}
	for k, center := range c.centers {
		to := c.columns(center)
		if c.points != nil {
			to = c.points[0][k]
		}
		_, d2 := apartSquared(c.columns(model), to)
		distances, scores = append(distances, d2), append(scores, -d2)
	}
	m := ordered(scores)
	hysteresis, _ := number(c.sum["hysteresis"])
	if len(last) == len(scores) {
		before := largestOf(last)
		if distances[m.Order[0]] >= (1-hysteresis)*(1-hysteresis)*distances[before] {
			scores[before] = 1 // above all others, which are not above 0
			m = ordered(scores)
		}
	}
	return m
}

func (c *contribution) words(models [][]float64, chosen mine) (words []uint32) {
	part := c.sum["part"]
	if part == "count" || part == "points" {
		return c.pointWords(models[0])
	}
	weights := chosen.among(c.open)
	if part == "choose" {
		for _, weight := range weights { // about 1 / K of K centers, or more
			words = append(words, map[bool]uint32{true: 1}[float64(len(weights))*weight >= 0.999])
		}
		return
	}
	share, _ := number(c.sum["share"])
	for _, k := range c.open {
		model, weight := models[0], weights[k]
		if len(models) > 1 {
			model = models[k]
		}
		if c.sum["choose"] == "posterior" {
			weight = 1
		}
		words = append(words, c.block(model, c.centers[k], weight*share)...)
	}
	return
}

// block is [(model - center) share / clip for every parameter, share, 1], or zeros.
func (c *contribution) block(model, center []float64, share float64) []uint32 {
	words := make([]uint32, len(center)+2)
	if share == 0 {
		return words
	}
	apart, d2 := apartSquared(model, center)
	shorten(apart, d2, c.scale.clip)
	for i, v := range apart {
		words[i] = c.scale.word(v * (share / c.scale.clip))
	}
	words[len(center)] = c.scale.word(share)
	words[len(center)+1] = 1
	return words
}

func shorten(vector []float64, d2, clip float64) {
	if length := math.Sqrt(d2); length > clip {
		for i := range vector {
			vector[i] *= clip / length
		}
	}
}

func (c *contribution) pointWords(model []float64) (words []uint32) {
	open, dealt := numbers(c.sum["points_open"]), c.sum["dealt"] == true
	clusters, mine := len(c.centers), c.columns(model)
	need(len(open) == clusters*len(c.points), "bad_task", "points_open of another shape than the centroids")
	lots := newPCG64(uint64(c.task["seed"].(int64)), 2)
	for r, points := range c.points {
		label, least := 0, math.Inf(1)
		for k := range points {
			if _, d2 := apartSquared(mine, points[k]); open[r*clusters+k] == 1 && d2 < least {
				label, least = k, d2
			}
		}
		if drawn := lots.below(uint32(clusters)); dealt && open[r*clusters+drawn] == 1 {
			label = drawn
		}
		for k := range points {
			words = append(words, c.pointBlock(mine, points[k], k == label, open[r*clusters+k] == 1)...)
		}
	}
	return
}

func (c *contribution) pointBlock(mine, point []float64, chosen, open bool) []uint32 {
	if c.sum["part"] == "count" {
		return []uint32{map[bool]uint32{true: 1}[chosen]}
	}
	words := make([]uint32, len(point)+2)
	if !chosen || !open {
		return words
	}
	apart, d2 := apartSquared(mine, point)
	shorten(apart, d2, c.scale.clip)
	length := 0.0
	for i, v := range apart {
		v /= c.scale.clip
		length += v * v
		words[i] = c.scale.word(v)
	}
	words[len(point)] = c.scale.word(length)
	words[len(point)+1] = 1
	return words
}

const scoreLevels = 1000 // of an accuracy or F1

// evaluationWords are: samples that are right, samples, accuracy and macro F1 in units of 1/1000, and one device.
func (w *work) evaluationWords(task, sum object, last []float64) (words []uint32) {
	models := [][]float64{}
	for _, one := range list(task["models"]) {
		if slot, there := one.(object)["own"]; there {
			models = append(models, w.own(slot.(string), one.(object)["init"]))
		} else {
			vector, _ := w.vector(one, "model")
			models = append(models, vector)
		}
	}
	prior, usual := numbers(task["prior"]), sum["usual"].(int64)
	switch sum["served"] {
	case "center":
		if len(last) == len(models) { // else it has none, or one among other centers
			usual = int64(largestOf(last))
		}
		models, prior = models[usual:usual+1], nil
	case "mixture":
		prior = last
		if len(last) != len(models) {
			prior = nil
			for range models {
				prior = append(prior, 1)
			}
		}
	}
	s := w.chosen(task)
	_, scores := w.evaluate(models, s, nil)
	matrix := w.confusion(s, scores, prior).values
	classes, right, f1, occurring := w.p.classes, 0.0, 0.0, 0.0
	for c := 0; c < classes; c++ {
		occurs := 0.0
		for d := 0; d < classes; d++ {
			occurs += matrix[c*classes+d] + matrix[d*classes+c]
		}
		right += matrix[c*classes+c]
		if occurs > 0 {
			f1, occurring = f1+2*matrix[c*classes+c]/occurs, occurring+1
		}
	}
	words = append(words, uint32(right), uint32(len(s.x)))
	for _, score := range []float64{right / float64(len(s.x)), f1 / occurring} {
		words = append(words, uint32(math.Floor(score*scoreLevels+secretNumber())))
	}
	return append(words, 1)
}
